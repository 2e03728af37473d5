"use strict";

// Answers live in localStorage under the study and the evaluator; nothing leaves this page but the
// file that is downloaded. Order and sides follow from the study's seed and the evaluator alone, so
// an evaluator who comes back meets the same pairs in the same places.

const study = JSON.parse(document.getElementById("study").textContent);
const screens = ["start", "trial", "end"].map((id) => document.getElementById(id));
const pictures = { left: document.querySelector("#left img"), right: document.querySelector("#right img") };
const PAUSE = 300; // milliseconds nobody needs to judge in: a double click answers one pair
const KEYS = { ArrowLeft: "left", 1: "left", ArrowRight: "right", 2: "right", Backspace: "undo" };

let evaluator = null;
let trials = []; // [{pair, prompt, left, right}], in this evaluator's order
let answers = []; // [{pair, left, right, choice, seconds}], of the first trials
let shown = null; // {trial, since}: what can be answered now, null while pictures load
let turn = 0; // counts the trials put on the screen

// Random numbers: 32-bit FNV-1a of a text seeds a Weyl sequence whose terms are mixed.

function randomOf(text) {
  let state = 0x811c9dc5;
  for (const byte of new TextEncoder().encode(text)) state = Math.imul(state ^ byte, 0x01000193);
  return () => {
    state = (state + 0x9e3779b9) | 0;
    let mixed = Math.imul(state ^ (state >>> 16), 0x85ebca6b);
    mixed = Math.imul(mixed ^ (mixed >>> 13), 0xc2b2ae35);
    return ((mixed ^ (mixed >>> 16)) >>> 0) / 2 ** 32;
  };
}

function trialsOf(name) {
  const random = randomOf(`${study.study} ${study.seed} ${name}`);
  let mirrored;
  // A group has each method first equally often, and is shown as it is or mirrored, as a whole.
  const found = study.pairs.map(({ pair, prompt, images }, number) => {
    if (number % study.group === 0) mirrored = random() < 0.5;
    const [left, right] = mirrored ? [...images].reverse() : images;
    return { pair, prompt, left, right };
  });
  for (let last = found.length - 1; last > 0; last--) {
    const other = Math.floor(random() * (last + 1));
    [found[last], found[other]] = [found[other], found[last]];
  }
  return found;
}

// What the browser keeps.

const place = (name) => `blind-study ${study.study} ${name}`;

function load(name) {
  try {
    return JSON.parse(localStorage.getItem(place(name))) ?? [];
  } catch {
    return [];
  }
}

function save() {
  try {
    localStorage.setItem(place(evaluator), JSON.stringify(answers));
    localStorage.setItem(`blind-study ${study.study}`, evaluator);
  } catch {
    warnUnsaved();
  }
}

function lastEvaluator() {
  try {
    return localStorage.getItem(`blind-study ${study.study}`) ?? "";
  } catch {
    warnUnsaved();
    return "";
  }
}

function warnUnsaved() {
  const note = document.getElementById("unsaved");
  note.hidden = false;
  document.body.prepend(note);
}

// What is on the screen.

function fill(name, text) {
  for (const node of document.querySelectorAll(`[data-number="${name}"], [data-text="${name}"]`)) node.textContent = text;
}

function turnTo(id) {
  for (const screen of screens) {
    const changes = screen.hidden === (screen.id === id);
    screen.hidden = screen.id !== id;
    if (changes && !screen.hidden && id !== "start") (screen.querySelector(".primary") ?? screen).focus();
  }
}

async function show() {
  shown = null;
  const mine = ++turn;
  const done = answers.length;
  for (const button of document.querySelectorAll('[data-action="undo"]')) button.disabled = done === 0;
  document.querySelector("progress").value = done;
  document.querySelector("#saved span").hidden = true;
  if (done === trials.length) return turnTo("end");
  const trial = trials[done];
  const group = document.querySelector(".pair");
  group.classList.add("loading");
  turnTo("trial");
  scrollTo(0, 0); // to a prompt that a narrow window has scrolled away
  fill("current", done + 1);
  const prompt = document.getElementById("prompt");
  prompt.textContent = trial.prompt;
  prompt.classList.toggle("long", trial.prompt.length > 160);
  const broken = document.getElementById("broken");
  broken.hidden = true;
  try {
    await Promise.all(["left", "right"].map((side) => put(pictures[side], trial[side])));
  } catch {
    broken.hidden = mine !== turn; // a picture that was replaced meanwhile is not broken
    return;
  }
  if (mine !== turn) return;
  group.classList.remove("loading");
  shown = { trial, since: performance.now() };
  preload(trials[done + 1]);
}

function put(picture, name) {
  picture.src = `images/${name}.png`;
  return picture.decode();
}

function preload(trial) {
  if (trial) for (const side of ["left", "right"]) put(new Image(), trial[side]).catch(() => {});
}

// What an evaluator does.

function enter(name) {
  evaluator = name;
  trials = trialsOf(name);
  answers = load(name);
  fill("evaluator", name);
  fill("file", file());
  save();
  show();
}

const ready = () => shown !== null && performance.now() - shown.since >= PAUSE;

function choose(choice) {
  if (!ready()) return;
  const { trial: { pair, left, right }, since } = shown;
  const seconds = Math.round(performance.now() - since) / 1000;
  answers.push({ pair, left, right, choice, seconds });
  save();
  show();
}

function undo() {
  if (!answers.length) return;
  answers.pop();
  save();
  show();
}

const file = () => `responses-${evaluator}.json`;

function download() {
  const content = {
    format: "blind-study-responses 1",
    study: study.study,
    evaluator,
    complete: answers.length === trials.length,
    downloaded: new Date().toISOString(),
    answers,
  };
  const link = document.createElement("a");
  link.download = file();
  link.href = URL.createObjectURL(new Blob([JSON.stringify(content, null, 2)], { type: "application/json" }));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  document.querySelector("#saved span").hidden = false;
}

// "Ann Lee" and "ann-lee" are one evaluator, and the name of a file.
function plain(name) {
  const words = name.normalize("NFKC").toLowerCase().match(/[\p{L}\p{M}\p{N}]+/gu) ?? [];
  return words.join("-").slice(0, 40);
}

const field = document.getElementById("name");

function announceFound() {
  const count = plain(field.value) ? load(plain(field.value)).length : 0;
  fill("found", count);
  document.querySelector("#found span").hidden = count === 0;
  document.getElementById("unfit").hidden = true;
}

field.addEventListener("input", announceFound);

document.getElementById("enter").addEventListener("submit", (event) => {
  event.preventDefault();
  const name = plain(field.value);
  document.getElementById("unfit").hidden = name !== "";
  if (name) enter(name);
});

const actions = { left: () => choose("left"), right: () => choose("right"), undo, download };

for (const button of document.querySelectorAll(".choice, [data-action]")) {
  button.addEventListener("click", () => actions[button.dataset.action ?? button.id]());
}

document.addEventListener("keydown", (event) => {
  if (evaluator === null || event.ctrlKey || event.altKey || event.metaKey) return;
  const action = KEYS[event.key];
  // A key held down answers one pair, not the next ones as well.
  if (action || event.repeat) event.preventDefault();
  if (action && !event.repeat) actions[action]();
});

// The same evaluator in another tab: go on from what was answered there.
addEventListener("storage", (event) => {
  if (evaluator === null || event.key !== place(evaluator)) return;
  answers = load(evaluator);
  show();
});

field.value = lastEvaluator();
announceFound();
turnTo("start");
field.focus();
