// The dialog for the API key. It is stored in this tab and sent in the header of each request, nowhere else.

import { server } from "./server.js";
import { translate } from "./words.js";

const dialog = document.querySelector("#key-dialog");
const input = document.querySelector("#key");
const problem = document.querySelector("#key-problem");
const button = document.querySelector("#key-button");

/** Ask for a key: the server requires one, or has refused the current one. */
export function askForKey() {
  button.hidden = false;
  if (!dialog.open) open(server.key ? translate("keyWrong") : "");
}

function open(words) {
  problem.textContent = words;
  input.value = "";
  document.querySelector("#key-forget").hidden = !server.key;
  dialog.showModal();
  input.focus();
}

button.hidden = !server.key;
button.addEventListener("click", () => open(""));
document.querySelector("#key-close").addEventListener("click", () => dialog.close());
document.querySelector("#key-forget").addEventListener("click", () => {
  dialog.close();
  server.useKey("");
});
document.querySelector("#key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = input.value.trim();
  input.value = "";
  if (!key) return;
  dialog.close();
  server.useKey(key);
});
