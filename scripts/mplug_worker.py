r"""mPLUG, the official judge of DPG-Bench, as a worker for `eval/judge=mplug`.

It needs modelscope with fairseq, which pin old versions of much else, so it runs under a Python of
its own (3.8 to 3.10) with the official requirements, and imports nothing of this project:

    python3.10 -m venv mplug
    mplug/bin/pip install -r <ELLA>/requirements-for-dpg_bench.txt
    python -m ssd_research.evaluate eval=dpg_bench eval/judge=mplug \
        eval.judge.command=[mplug/bin/python,scripts/mplug_worker.py]

Messages are one line of JSON each; see src/ssd_research/metrics/judges/worker.py. The model is
loaded with the first picture: a finished evaluation never asks for one.
"""

import argparse
import base64
import io
import json
import os
import sys

from PIL import Image

MODEL = "damo/mplug_visual-question-answering_coco_large_en"


def main():
    """Load mPLUG, say so, and answer until the input ends."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--model", default=MODEL, help="modelscope id or local folder")
    options.add_argument("--device", default="gpu", choices=("gpu", "cpu"))
    chosen = options.parse_args()
    # modelscope prints to standard output, which belongs to the messages.
    messages = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    import modelscope

    send(messages, {"name": chosen.model, "version": "modelscope " + modelscope.__version__})
    judge = None
    for line in sys.stdin:
        request = json.loads(line)
        if judge is None:
            judge = load(chosen.model, chosen.device)
        image = Image.open(io.BytesIO(base64.b64decode(request["image"]))).convert("RGB")
        texts = [judge({"image": image, "question": q})["text"] for q in request["questions"]]
        send(messages, {"answers": texts})


def load(model, device):
    """Return modelscope's pipeline for visual questions."""
    from modelscope.pipelines import pipeline
    from modelscope.utils.constant import Tasks

    return pipeline(Tasks.visual_question_answering, model=model, device=device)


def send(messages, message):
    """Write one message and flush it."""
    messages.write(json.dumps(message) + "\n")
    messages.flush()


if __name__ == "__main__":
    main()
