"""VQA judges: tiny random models of the real classes, records, and workers that come to grief."""

import csv
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.utils import get_method
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertTokenizer,
    BlipConfig,
    BlipForQuestionAnswering,
    BlipImageProcessor,
    BlipProcessor,
    CLIPImageProcessor,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from dpg_folders import ITEMS, TILES, configure, scores_of, write_run
from ssd_research import evaluate
from ssd_research.metrics.judges import pretrained
from ssd_research.metrics.judges.blip import MOST_TOKENS, BlipJudge
from ssd_research.metrics.judges.chat import ChatJudge
from ssd_research.metrics.judges.recorded import RecordedJudge
from ssd_research.metrics.judges.shapes_vqa import ShapesVQA
from ssd_research.metrics.judges.vqa import Answer, Asked, JudgeError
from ssd_research.metrics.judges.worker import WorkerJudge

ROOT = Path(__file__).parents[1]
WORDS = "is there a cup red the on table dog yes no ?".split()  # noqa: SIM905
QUESTIONS = ["is there a cup ?", "is the cup on the table ?", "red ?", "is there a dog ?"]


def asked(*questions: str) -> list[Asked]:
    return [Asked("a", 0, n, text) for n, text in enumerate(questions, 1)]


@pytest.fixture
def image() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)


# BLIP --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def blip(tmp_path_factory) -> Path:
    """Write a tiny random BLIP in Hugging Face layout."""
    folder = tmp_path_factory.mktemp("blip")
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[DEC]", *WORDS]
    (folder / "vocab.txt").write_text("\n".join(vocabulary) + "\n")
    tokenizer = BertTokenizer(str(folder / "vocab.txt"))
    width = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = BlipConfig(
        text_config={
            **width,
            "vocab_size": len(vocabulary),
            "encoder_hidden_size": 16,
            "num_attention_heads": 2,
            "max_position_embeddings": 32,
            "bos_token_id": 5,
            "sep_token_id": 3,
            "pad_token_id": 0,
        },
        vision_config={**width, "num_attention_heads": 2, "image_size": 32, "patch_size": 16},
        projection_dim=16,
    )
    torch.manual_seed(0)
    model = BlipForQuestionAnswering(config)
    for parameter in model.parameters():  # larger than at the start, so that answers differ
        if parameter.dim() > 1:
            parameter.data.normal_()
    model.save_pretrained(folder)
    processor = BlipProcessor(BlipImageProcessor(size={"height": 32, "width": 32}), tokenizer)
    processor.save_pretrained(folder)
    return folder


def test_blip_answers_as_transformers_does_for_each_question_alone(blip, image):
    judge = BlipJudge(str(blip), device="cpu")
    found = judge.answer(image, asked(*QUESTIONS))
    model = BlipForQuestionAnswering.from_pretrained(blip)
    processor = BlipProcessor.from_pretrained(blip)
    words = processor.tokenizer.convert_tokens_to_ids(["yes", "no"])
    for question, answer in zip(QUESTIONS, found, strict=True):
        inputs = processor(images=image, text=question, return_tensors="pt")
        reply = model.generate(
            **inputs,
            max_new_tokens=MOST_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert answer.answer == processor.decode(reply.sequences[0], skip_special_tokens=True)
        p_yes = reply.logits[0][0, words].softmax(-1)[0].item()
        assert answer.p_yes == pytest.approx(p_yes, abs=1e-5)
    assert len({a.p_yes for a in found}) == len(QUESTIONS)
    assert judge.answer(image, []) == []


def test_weights_that_overflow_are_no_answers(blip, chat, image):
    """NaN compares as less: it would pass for a confident no."""
    for judge in (BlipJudge(str(blip), device="cpu"), chat_judge(chat)):
        model, _ = judge._loaded
        head = model.text_decoder.cls.predictions if hasattr(model, "text_decoder") else model
        head = head.decoder if hasattr(head, "decoder") else head.lm_head
        head.weight.data[:, 0] = float("nan")
        with pytest.raises(JudgeError, match="computes no finite numbers"):
            judge.answer(image, asked(QUESTIONS[0]))


def test_a_judge_is_known_by_its_weights(blip, tmp_path):
    judge = BlipJudge(str(blip), device="cpu")
    assert judge.name == str(blip)
    assert judge.version.startswith("sha256:")
    assert BlipJudge(str(blip), device="cpu", dtype="bfloat16").version != judge.version
    with pytest.raises(ValueError, match=r"eval\.judge\.dtype=int8 is not known"):
        BlipJudge(str(blip), device="cpu", dtype="int8").answer(np.zeros((8, 8, 3), np.uint8), [])


def test_absent_and_broken_weights_are_one_line(blip, tmp_path):
    with pytest.raises(JudgeError, match=r"eval\.judge\.model=nobody/nothing cannot be") as caught:
        BlipJudge("nobody/nothing")
    assert "\n" not in str(caught.value)
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in blip.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(JudgeError, match="cannot be loaded") as caught:
        BlipJudge(str(broken)).answer(np.zeros((8, 8, 3), np.uint8), asked("red ?"))
    assert "\n" not in str(caught.value)


# Chat models -------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}<image> {% else %}{{ c['text'] }} {% endif %}"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}answer{% endif %}"
)


@pytest.fixture(scope="module")
def chat(tmp_path_factory) -> Path:
    """Write a tiny random LLaVA in Hugging Face layout."""
    folder = tmp_path_factory.mktemp("chat")
    words = ["<pad>", "<unk>", "<image>", "answer", "with", "or", "Yes", "No", "perhaps", *WORDS]
    backend = Tokenizer(models.WordLevel({w: n for n, w in enumerate(words)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", extra_special_tokens={}
    )
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    size = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = LlavaConfig(
        vision_config={
            **size,
            "model_type": "clip_vision_model",
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
            "projection_dim": 16,
        },
        text_config={
            **size,
            "model_type": "llama",
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "vocab_size": len(words),
            "max_position_embeddings": 64,
        },
        image_token_index=2,
        image_seq_length=4,
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    model = LlavaForConditionalGeneration(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    pictures = CLIPImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28})
    processor = LlavaProcessor(
        image_processor=pictures,
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
        chat_template=TEMPLATE,
    )
    processor.save_pretrained(folder)
    return folder


def chat_judge(folder: Path, **options: object) -> ChatJudge:
    given = {"device": "cpu", "dtype": "float32", "least_mass": 0.0, **options}
    return ChatJudge(str(folder), prompt="{question} answer with yes or no", **given)


def test_chat_judge_compares_yes_and_no_as_first_token(chat, image):
    judge = chat_judge(chat)
    found = judge.answer(image, asked(*QUESTIONS))
    model, processor = judge._loaded
    for question, answer in zip(QUESTIONS, found, strict=True):
        text = f"<image> {question} answer with yes or no answer"
        inputs = processor(images=image, text=text, return_tensors="pt")
        p = model(**inputs).logits[0, -1].softmax(-1)
        yes, no = (sum(p[i] for i in judge._words[word]) for word in ("yes", "no"))
        assert answer.p_yes == pytest.approx((yes / (yes + no)).item(), abs=1e-5)
        assert answer.answer == ("yes" if yes > no else "no")
    tokens = {
        word: processor.tokenizer.convert_ids_to_tokens(i) for word, i in judge._words.items()
    }
    assert tokens == {"yes": ["Yes", "yes"], "no": ["No", "no"]}


def test_chat_answers_do_not_depend_on_their_company(chat, image):
    together = chat_judge(chat).answer(image, asked(*QUESTIONS))
    alone = [chat_judge(chat, batch_size=1).answer(image, asked(q))[0] for q in QUESTIONS]
    assert [a.answer for a in together] == [a.answer for a in alone]
    assert [a.p_yes for a in together] == pytest.approx([a.p_yes for a in alone], abs=1e-5)


def test_a_chat_model_with_something_else_to_say_is_unparsable(chat):
    judge = chat_judge(chat, least_mass=0.2)
    vocabulary = judge._loaded[1].tokenizer.get_vocab()
    p = torch.zeros(len(vocabulary))
    for word, share in {"perhaps": 0.85, "Yes": 0.05, "yes": 0.05, "No": 0.05}.items():
        p[vocabulary[word]] = share
    found = [judge._read(p), chat_judge(chat, least_mass=0.1)._read(p)]
    assert [a.answer for a in found] == ["perhaps", "yes"]
    assert [a.p_yes for a in found] == pytest.approx([2 / 3, 2 / 3])
    assert judge._read(torch.eye(len(vocabulary))[vocabulary["red"]]) == Answer("red", None)
    with pytest.raises(ValueError, match="has no place for"):
        ChatJudge(str(chat), prompt="Yes or no?")
    with pytest.raises(ValueError, match=r"eval\.judge\.batch_size=0 must be at least 1"):
        ChatJudge(str(chat), batch_size=0)
    with pytest.raises(ValueError, match="least_mass=2"):
        ChatJudge(str(chat), least_mass=2)


# Records -----------------------------------------------------------------------------------------


def write_csv(path: Path, rows: list[dict]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_recorded_answers_of_others_are_replayed(tmp_path, image):
    rows = [
        {"model": model, "item_id": "a", "qid": n, "said": said}
        for model, said in (("x", "yes"), ("y", "no"))
        for n in (1, 2)
    ]
    path = str(write_csv(tmp_path / "pali.csv", rows))
    columns = {"question": "qid", "answer": "said"}
    judge = RecordedJudge(path, columns=columns, where={"model": "y"})
    assert judge.name == "pali"
    assert judge.version.startswith("recorded ")
    assert judge.version.endswith("model=y")
    assert judge.answer(image, asked("one ?", "two ?")) == [Answer("no")] * 2
    with pytest.raises(JudgeError, match="no answer to question 3 of item a, image 0"):
        judge.answer(image, asked("1", "2", "3"))
    with pytest.raises(JudgeError, match="image 1"):
        judge.answer(image, [Asked("a", 1, 1, "one ?")])
    with pytest.raises(ValueError, match="holds two answers to question 1 of item a"):
        RecordedJudge(path, columns=columns).answer(image, asked("one ?"))
    with pytest.raises(ValueError, match=r"a row without 'question_id'; set eval\.judge\.columns"):
        RecordedJudge(path).answer(image, asked("one ?"))
    with pytest.raises(ValueError, match="accepted: item, tile, question, answer, p_yes"):
        RecordedJudge(path, columns={"reply": "said"})
    with pytest.raises(ValueError, match="holds no answers"):
        RecordedJudge(path, where={"model": "z"})


def test_our_own_answers_score_again_without_the_judge(tmp_path):
    images = write_run(tmp_path / "made")
    first = evaluate.run(configure(images))
    recorded = ["eval/judge=recorded", f"eval.judge.path={first}/answers.jsonl"]
    elsewhere = f"output_dir={tmp_path}/again"
    again = evaluate.run(configure(images, *recorded, elsewhere))
    assert again.name == first.name
    assert (again / "scores.json").read_text() == (first / "scores.json").read_text()
    other = write_run(tmp_path / "other")
    (other / "00001" / "samples" / "0000.png").write_bytes(
        (other / "00000" / "samples" / "0000.png").read_bytes()
    )
    with pytest.raises(JudgeError, match="about other pixels: question 1 of item shapes0001"):
        evaluate.run(configure(other, *recorded, elsewhere))


def test_broken_records_are_one_line(tmp_path, image):
    path = tmp_path / "answers.jsonl"
    whole = {"item_id": "a", "tile": 0, "question_id": 1, "answer": "yes", "p_yes": 0.9}
    path.write_text(json.dumps(whole) + "\n" + '{"item_id": ')
    assert RecordedJudge(str(path)).answer(image, asked("one ?")) == [Answer("yes", 0.9)]
    path.write_text('{"item_id": \n' + json.dumps(whole) + "\n")
    with pytest.raises(ValueError, match="no JSON object"):
        RecordedJudge(str(path))
    path.write_text(json.dumps({**whole, "tile": "first"}) + "\n")
    with pytest.raises(ValueError, match="a recorded answer is malformed"):
        RecordedJudge(str(path)).answer(image, asked("one ?"))
    for p_yes in ("7", "NaN", "-1"):
        path.write_text(json.dumps({**whole, "p_yes": p_yes}) + "\n")
        with pytest.raises(ValueError, match="p_yes is no probability"):
            RecordedJudge(str(path)).answer(image, asked("one ?"))
    for last in ("3", "null", "[]"):
        path.write_text(json.dumps(whole) + "\n" + last)
        with pytest.raises(ValueError, match="no JSON object"):
            RecordedJudge(str(path))
    path.write_bytes(json.dumps(whole).encode() + b"\xff\n")
    with pytest.raises(ValueError, match=r"answers\.jsonl is not UTF-8 text"):
        RecordedJudge(str(path))
    path.write_text("".join(json.dumps({**whole, "judge": j}) + "\n" for j in "xy"))
    with pytest.raises(ValueError, match="mixes the answers of x and y"):
        RecordedJudge(str(path))
    (tmp_path / "answers.txt").write_text("")
    with pytest.raises(ValueError, match=r"must end in \.csv or \.jsonl"):
        RecordedJudge(str(tmp_path / "answers.txt"))


def test_tables_of_answers_are_read_as_spreadsheets_write_them(tmp_path, image):
    """With a byte-order mark, Windows line ends, line breaks of every kind inside a cell."""
    path = tmp_path / "answers.csv"
    text = 'item_id,question_id,answer\r\na,1,yes\r\na,2,"no\u2028way\nat all"\r\n'
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    answers = RecordedJudge(str(path)).answer(image, asked("one ?", "two ?"))
    assert answers == [Answer("yes"), Answer("no\u2028way\nat all")]
    path.write_text("item_id,question_id,answer\na,1,yes,or no\n")
    with pytest.raises(ValueError, match="more cells than columns"):
        RecordedJudge(str(path))


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.model", "config.json"])
def test_another_file_of_a_local_judge_is_another_judge(tmp_path, name):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = pretrained.version(str(tmp_path), None)
    (tmp_path / name).write_text("{}")
    assert pretrained.version(str(tmp_path), None) != before


# Workers -----------------------------------------------------------------------------------------


def worker(tmp_path: Path, body: str, *, hello: str = '{"name": "stub", "version": "1"}') -> list:
    """Write a worker that greets, then runs `body` for each request (`n` counts from 1)."""
    path = tmp_path / "worker.py"
    path.write_text(
        f"import json, os, sys, time\nprint('{hello}', flush=True)\n"
        "for n, line in enumerate(sys.stdin, 1):\n"
        "    request = json.loads(line)\n"
        "    say = lambda m: print(json.dumps(m), flush=True)\n"
        "    yes = ['yes'] * len(request['questions'])\n" + textwrap.indent(body, "    ") + "\n"
    )
    return [sys.executable, str(path)]


def test_worker_answers(tmp_path, image):
    body = "say({'answers': [{'answer': 'no', 'p_yes': 0.25}, request['image'][:5]]})"
    judge = WorkerJudge(worker(tmp_path, body))
    assert (judge.name, judge.version) == ("stub", "1")
    found = judge.answer(image, asked("one ?", "two ?"))
    assert found == [Answer("no", 0.25), Answer("iVBOR")]  # PNG in base64
    judge.close()
    assert judge._process.poll() == 0


GRIEF = {
    "dies": ("sys.exit('CUDA out of memory')", "ended with status 1: CUDA out of memory"),
    "killed": ("os.kill(os.getpid(), 9)", "ended with status -9"),
    "half a line": ("sys.stdout.write('{\"answ'); sys.stdout.flush(); sys.exit(3)", "status 3"),
    "chatters": ("print('loading weights', flush=True)", "wrote what is no JSON object: 'loading"),
    "too few": ("say({'answers': ['yes']})", "did not give 2 answers"),
    "no text": (r"os.write(1, b'\xff\xfe\n')", "wrote what is no JSON object"),
    "closes": ("os.close(1); time.sleep(60)", "closed its output"),
    "null": ("say({'answers': [None, 'yes']})", "gave what is no answer: None"),
    "no answer": ("say({'answers': [{'p_yes': 1}, 'yes']})", "gave what is no answer"),
    "nan": ("say({'answers': [{'answer': 'yes', 'p_yes': float('nan')}] * 2})", "is no answer"),
    "percent": ("say({'answers': [{'answer': 'yes', 'p_yes': 97}] * 2})", "gave what is no answer"),
    "number": ("print(3, flush=True)", "wrote what is no JSON object: '3'"),
    "gives up": ("say({'error': 'no such picture'})", "gave up: no such picture"),
}


@pytest.mark.parametrize(("body", "words"), GRIEF.values(), ids=GRIEF)
def test_a_worker_in_grief_is_one_line(tmp_path, image, body, words):
    judge = WorkerJudge(worker(tmp_path, body))
    with pytest.raises(JudgeError, match=words) as caught:
        judge.answer(image, asked("one ?", "two ?"))
    assert "\n" not in str(caught.value)
    assert judge._process.poll() is not None


def test_a_worker_that_says_more_than_it_was_asked_is_noticed(tmp_path, image):
    judge = WorkerJudge(worker(tmp_path, "say({'answers': yes})\nsay({'answers': ['no']})"))
    assert judge.answer(image, asked("one ?")) == [Answer("yes")]
    while judge._lines.empty():
        time.sleep(0.01)
    with pytest.raises(JudgeError, match=r"wrote what it was not asked for: .*no"):
        judge.answer(image, asked("one ?"))


def test_a_worker_that_never_reads_is_given_up(tmp_path):
    """Its pipe holds less than one picture, so that writing to it would never end."""
    path = tmp_path / "deaf.py"
    path.write_text('import time\nprint(\'{"name": "x", "version": "1"}\', flush=True)\n')
    path.write_text(path.read_text() + "time.sleep(60)\n")
    large = np.random.default_rng(0).integers(0, 256, (384, 384, 3), dtype=np.uint8)
    judge = WorkerJudge([sys.executable, str(path)], load_timeout=2)
    with pytest.raises(JudgeError, match=r"silent for 2 s; raise eval\.judge\.load_timeout"):
        judge.answer(large, asked("one ?"))
    assert judge._process.poll() is not None


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_time_limits_are_seconds_above_0(seconds):
    for name in ("timeout", "load_timeout"):
        with pytest.raises(ValueError, match=rf"eval\.judge\.{name}={seconds} must be a number"):
            WorkerJudge(["true"], **{name: seconds})


def test_a_silent_worker_is_given_up_after_its_first_picture(tmp_path, image):
    body = "time.sleep(0.4 if n == 1 else 60)\nsay({'answers': yes})"
    judge = WorkerJudge(worker(tmp_path, body), timeout=0.3)
    assert judge.answer(image, asked("one ?")) == [Answer("yes")]
    with pytest.raises(JudgeError, match=r"silent for 0.3 s; raise eval.judge.timeout"):
        judge.answer(image, asked("one ?"))
    assert judge._process.poll() is not None


def test_a_worker_that_cannot_start_is_one_line(tmp_path):
    with pytest.raises(JudgeError, match="cannot be started: No such file"):
        WorkerJudge(["mplug/bin/python", "worker.py"])
    with pytest.raises(JudgeError, match="began without its 'version'"):
        WorkerJudge(worker(tmp_path, "pass", hello='{"name": "stub"}'))
    with pytest.raises(JudgeError, match="began without its 'name'"):
        WorkerJudge(worker(tmp_path, "pass", hello='{"name": null, "version": "1"}'))
    with pytest.raises(JudgeError, match=r"silent for 0\.2 s; raise eval\.judge\.load_timeout"):
        WorkerJudge([sys.executable, "-c", "import time; time.sleep(60)"], load_timeout=0.2)
    with pytest.raises(JudgeError, match="ended with status 1: ModuleNotFoundError: No module"):
        WorkerJudge([sys.executable, "-c", "import modelscope_is_not_here"])
    with pytest.raises(ValueError, match="must be a list of words"):
        WorkerJudge("python worker.py")


def test_mplug_worker_speaks_our_language(tmp_path, image, monkeypatch):
    """With a stand-in for modelscope that prints where it should not, as the real one does."""
    package = tmp_path / "modelscope"
    (package / "utils").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '1.2'\nprint('modelscope says hello')\n")
    (package / "utils" / "__init__.py").write_text("")
    (package / "utils" / "constant.py").write_text("class Tasks: visual_question_answering = 'vqa'")
    (package / "pipelines.py").write_text(
        "def pipeline(task, model, device):\n"
        "    print('loading', task, model, device)\n"
        "    return lambda x: {'text': f'{x[\"question\"]} {x[\"image\"].size[0]} {device}'}\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    script = str(ROOT / "scripts" / "mplug_worker.py")
    judge = WorkerJudge([sys.executable, script, "--device", "cpu"])
    assert judge.name == "damo/mplug_visual-question-answering_coco_large_en"
    assert judge.version == "modelscope 1.2"
    found = judge.answer(image, asked("one ?", "two ?"))
    assert [a.answer for a in found] == ["one ? 40 cpu", "two ? 40 cpu"]


# Evaluations with judges that fail ---------------------------------------------------------------


def with_worker(images: Path, command: list[str]):
    words = ",".join(command)
    return configure(images, "eval/judge=mplug", f"eval.judge.command=[{words}]")


def test_a_judge_that_dies_halfway_loses_nothing(tmp_path, monkeypatch):
    images = write_run(tmp_path / "made")
    dying = worker(tmp_path, "sys.exit('out of luck') if n == 6 else say({'answers': yes})")
    with pytest.raises(JudgeError, match="ended with status 1: out of luck"):
        evaluate.run(with_worker(images, dying))
    (store,) = (tmp_path / "outputs").rglob("answers.jsonl")
    kept = store.read_text()
    assert len({(r["item_id"], r["tile"]) for r in map(json.loads, kept.splitlines())}) == 5
    assert not (store.parent / "DONE").exists()
    sound = worker(tmp_path, "open('asked', 'a').write('x')\nsay({'answers': yes})")
    monkeypatch.chdir(tmp_path)
    folder = evaluate.run(with_worker(images, sound))
    assert folder == store.parent
    assert (tmp_path / "asked").read_text() == "x" * (ITEMS * TILES - 5)
    assert store.read_text().startswith(kept)
    scores = scores_of(folder)
    assert (scores["average"], scores["judge"]) == (1, "stub 1")


def test_unparsable_answers_reach_the_scores(tmp_path):
    images = write_run(tmp_path / "made")
    odd = worker(tmp_path, "say({'answers': ['I think so', *yes[1:]]})")
    scores = scores_of(evaluate.run(with_worker(images, odd)))
    assert scores["unparsable"]["unparsable"] == ITEMS * TILES
    assert scores["average"] < 1


def test_blip_and_chat_run_the_whole_evaluation(tmp_path, blip, chat):
    images = write_run(tmp_path / "made", tiles=1)
    for name, model in (("blip", blip), ("chat", chat)):
        scores = scores_of(
            evaluate.run(
                configure(
                    images,
                    "images_per_prompt=1",
                    f"eval/judge={name}",
                    f"eval.judge.model={model}",
                    "eval.judge.dtype=float32",
                )
            )
        )
        assert scores["judge"].startswith(f"{model} sha256:")
        assert scores["unparsable"]["answers"] > 0


def test_every_judge_of_the_configuration_exists():
    for path in (ROOT / "conf" / "eval" / "judge").glob("*.yaml"):
        cfg = configure(Path("nowhere/images"), f"eval/judge={path.stem}")
        assert callable(get_method(cfg.eval.judge._target_))
        assert configure(Path("x/y"), "eval=dpg_bench", f"eval/judge={path.stem}").eval.tiles == 4


def test_a_broken_answer_count_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(ShapesVQA, "answer", lambda self, image, questions: [Answer("yes")])
    with pytest.raises(JudgeError, match="gave 1 answers to"):
        evaluate.run(configure(write_run(tmp_path / "made", tiles=1), "images_per_prompt=1"))


@pytest.mark.slow
def test_a_killed_evaluation_resumes(tmp_path):
    images = write_run(tmp_path / "made")
    slow = worker(tmp_path, "time.sleep(0.3)\nsay({'answers': ['no', *yes[1:]]})")
    words = ",".join(slow)
    command = [
        *(sys.executable, "-m", "ssd_research.evaluate", "eval=shapes_dpg", "eval/judge=mplug"),
        *(f"eval.judge.command=[{words}]", f"evaluate.images={images}", "runtime=cpu"),
        *(f"output_dir={tmp_path}/outputs", f"selection.limit={ITEMS}"),
        f"images_per_prompt={TILES}",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (stores := list((tmp_path / "outputs").rglob("answers.jsonl"))) or (
        stores[0].read_text().count("\n") < 10
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    (store,) = stores
    kept = store.read_text()
    assert not (store.parent / "DONE").exists()
    subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
    whole = store.read_text()
    assert whole.startswith(kept[: kept.rindex("\n")].rpartition("\n")[0])
    clean = evaluate.run(
        configure(images, "eval/judge=mplug", f"eval.judge.command=[{words}]",
                  f"output_dir={tmp_path}/clean", "evaluate.bootstrap=2000")
    )  # fmt: skip
    assert clean.name == store.parent.name
    assert (clean / "answers.jsonl").read_text() == whole
    assert (clean / "scores.json").read_text() == (store.parent / "scores.json").read_text()
