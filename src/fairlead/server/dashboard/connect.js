// How to use the server from a program: its version and address, and snippets with the right model.

import { copyButton } from "./copy.js";
import { element, setText } from "./element.js";
import { textModels } from "./models.js";
import { addPage, poll } from "./router.js";
import { server } from "./server.js";
import { translate } from "./words.js";

const EVERY_MS = 60_000;

const picker = document.querySelector("#connect-model");
const version = document.querySelector("#version");
const address = document.querySelector("#address");
const base = new URL(".", location.href).href.replace(/\/$/, "");
const snippets = Object.fromEntries(["curl", "python"].map((name) => {
  const code = element("code");
  const copy = copyButton(() => code.textContent);
  document.querySelector(`#${name}`).append(element("pre", { tabindex: "0" }, code), copy);
  return [name, code];
}));

/** Return a text as a word of a shell. */
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function curl(model) {
  const body = JSON.stringify({ model, messages: [{ role: "user", content: translate("hello") }] });
  const key = server.key ? [`  -H "Authorization: Bearer $OPENAI_API_KEY"`] : [];
  return [`curl ${base}/v1/chat/completions`, `  -H "Content-Type: application/json"`, ...key, `  -d ${quoted(body)}`].join(" \\\n");
}

function python(model) {
  const given = server.key ? `os.environ["OPENAI_API_KEY"]` : `"unused"`;
  return [
    ...(server.key ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${JSON.stringify(`${base}/v1`)}, api_key=${given})`,
    "answer = client.chat.completions.create(",
    `    model=${JSON.stringify(model)},`,
    `    messages=[{"role": "user", "content": ${JSON.stringify(translate("hello"))}}],`,
    ")",
    "print(answer.choices[0].message.content)",
  ].join("\n");
}

function draw() {
  const chosen = picker.value || document.querySelector("#chat-model").value;
  const names = textModels();
  picker.replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  if (names.includes(chosen)) picker.value = chosen;
  setText(address, `${base}/v1`);
  setText(snippets.curl, curl(picker.value));
  setText(snippets.python, python(picker.value));
}

picker.addEventListener("change", draw);
document.addEventListener("modelschange", draw);
addPage("connect", "connect", {
  start: () => poll("version", (found) => { setText(version, found.version); draw(); }, EVERY_MS),
  draw,
});
