// A button that copies a text.

import { element, setText } from "./element.js";
import { translate } from "./words.js";

const SHOWN_MS = 1500;

/** Return a button that copies what `text()` returns. Without a clipboard (plain HTTP) it selects a copy. */
export function copyButton(text) {
  const button = element("button", { type: "button", class: "quiet small" }, translate("copy"));
  button.addEventListener("click", async () => {
    const isCopied = await copy(text());
    setText(button, translate(isCopied ? "copied" : "notCopied"));
    setTimeout(() => setText(button, translate("copy")), SHOWN_MS);
  });
  return button;
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // not allowed, or not a secure context
    const area = element("textarea", { class: "visually-hidden", "aria-hidden": "true" });
    area.value = text;
    document.body.append(area);
    const focused = document.activeElement;
    area.select();
    const isCopied = document.execCommand("copy");
    area.remove();
    focused?.focus();
    return isCopied;
  }
}
