// Plans in the browser: the controls become the words of plan.py's command line, and Pyodide runs plan.py with them.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const form = document.getElementById("planner");
const at = (id) => document.getElementById(id);
const GIB = 2 ** 30;
const OUTSIDE = "context and communicators", RESERVE = "reserved by the allocator beyond the plan";
const RUN = `
import contextlib, io, sys
from pathlib import Path
from fsdp_plan import plan

def run(words, config):
    Path("config.json").write_text(config)
    said, error, code = io.StringIO(), io.StringIO(), 0
    sys.argv = ["plan.py", *words]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(error):
        try:
            plan.main()
        except SystemExit as end:
            code = end.code
    return code, said.getvalue(), error.getvalue()
`;
let run;  // once Python has started

async function start() {
  at("state").textContent = "Python starts in your browser: a few seconds …";
  const python = await loadPyodide();
  const wheel = await fetch(new URL(form.dataset.wheel, import.meta.url));
  python.unpackArchive(await wheel.arrayBuffer(), "wheel", { extractDir: "/home/pyodide" });
  python.runPython(RUN);
  run = (words, config) => {
    const result = python.globals.get("run")(python.toPy(words), config);
    const found = result.toJs();
    result.destroy();
    return found;
  };
}

function words() {
  const given = form.preset.value ? [] : ["--config", "config.json"];
  for (const control of form.elements) {
    if (control.name && control.name !== "config" && control.value) {
      given.push("--" + control.name.replaceAll("_", "-"), control.value);
    }
  }
  return given;
}

function draw(found) {
  const colours = JSON.parse(form.dataset.colours);
  const limit = Number(form.gpu.selectedOptions[0].dataset.gib);
  const { outside, needs } = found.memory;
  const parts = Object.entries(found.by_category).map(([name, size]) => [name, size / GIB]);
  parts.push([OUTSIDE, outside], [RESERVE, needs - outside - found.peak / GIB]);
  const whole = Math.max(limit, needs);
  at("bar").replaceChildren();
  at("legend").replaceChildren();
  for (const [name, size] of parts) {
    const piece = document.createElement("span"), entry = document.createElement("li"), sample = document.createElement("i");
    for (const each of [piece, sample]) {
      each.style.backgroundColor = colours[name] ?? (name === OUTSIDE ? "#555555" : "");
      each.className = name === RESERVE ? "reserved" : "";
    }
    piece.style.width = `${100 * size / whole}%`;
    piece.title = `${name}: ${size.toFixed(2)} GiB`;
    entry.append(sample, piece.title);
    at("bar").append(piece);
    at("legend").append(entry);
  }
  const line = document.createElement("span");
  line.className = "limit";
  line.style.left = `${100 * limit / whole}%`;
  line.textContent = `${limit} GiB`;
  at("bar").append(line);
  at("bar").setAttribute("aria-label", `Memory of a rank, of ${limit} GiB: ` + parts.map(([name, size]) => `${name} ${size.toFixed(2)} GiB`).join(", "));
}

function answer() {
  const asked = words();
  const [code, text, error] = run(asked, form.config.value);
  at("answer").hidden = code !== 0;
  at("error").hidden = code === 0;
  at("error").textContent = error.trimEnd();
  if (code === 0) {
    const json = run([...asked, "--json"], form.config.value)[1];
    const found = JSON.parse(json);
    at("json").textContent = json;
    at("text").textContent = text;
    at("words").textContent = text.split("\n").find((line) => /^(fits|tight|does not fit)/.test(line));
    at("command").textContent = found.command ?? text.trimEnd().split("\n").at(-1);
    at("asked").textContent = `python plan.py ${asked.join(" ")} --json`;
    draw(found);
  }
}

function show() {
  at("pasted").hidden = Boolean(form.preset.value);
  try {
    answer();
  } catch (error) {
    at("answer").hidden = true;
    at("error").hidden = false;
    at("error").textContent = `The planner stopped: ${String(error.message ?? error).trim().split("\n").at(-1)}`;
  }
  at("state").textContent = "";
  form.dataset.answered = location.hash;
}

function readAddress() {
  for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
    if (form.elements[name]) form.elements[name].value = value;
  }
}

function writeAddress() {
  const settings = new FormData(form);
  if (form.preset.value) settings.delete("config");
  history.replaceState(null, "", "#" + new URLSearchParams(settings));
}

readAddress();
form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("change", () => { writeAddress(); if (run) show(); });
window.addEventListener("hashchange", () => { readAddress(); if (run) show(); });
try {
  await start();
  show();
} catch (error) {
  at("state").textContent = `Python did not start: ${error.message ?? error}`;
}
