// What the page says, in the reader's language, and how it writes numbers.

import en from "./words/en.js";
import ja from "./words/ja.js";
import zh from "./words/zh.js";

const languages = { en, ja, zh };
const STORED = "fairlead-language";
let language = "en";

/** The words for a key, with `{name}` filled in from `values`. */
export function say(key, values = {}) {
  const words = languages[language][key] ?? en[key] ?? key;
  return words.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
}

/** Whether there are words for this key, which may be anything that a server sent. */
export const knows = (key) => Object.hasOwn(en, key);

export const currentLanguage = () => language;

/** Take the language chosen before, else the first of the browser's that we have. */
export function chooseFirstLanguage() {
  let stored = null;
  try {
    stored = localStorage.getItem(STORED);
  } catch { /* storage can be forbidden */ }
  const wanted = [stored, ...navigator.languages].map((tag) => String(tag).slice(0, 2).toLowerCase());
  setLanguage(wanted.find((tag) => Object.hasOwn(languages, tag)) ?? "en");
}

/** Speak another language from now on: everything marked in the page, and whoever listens to `languagechange`. */
export function chooseLanguage(tag) {
  try {
    localStorage.setItem(STORED, tag);
  } catch { /* then until the page is left */ }
  setLanguage(tag);
  document.dispatchEvent(new Event("languagechange"));
}

function setLanguage(tag) {
  language = tag;
  document.documentElement.lang = tag === "zh" ? "zh-Hans" : tag;
  for (const element of document.querySelectorAll("[data-words]")) element.textContent = say(element.dataset.words);
  for (const element of document.querySelectorAll("[data-placeholder]")) element.placeholder = say(element.dataset.placeholder);
}

// Numbers --------------------------------------------------------------------------------------------

const formats = new Map();

function format(number, options) {
  const name = language + JSON.stringify(options);
  if (!formats.has(name)) formats.set(name, new Intl.NumberFormat(language, options));
  return formats.get(name).format(number);
}

/** A count; large ones in short: 12.3K, 1.23万. */
export const count = (n) => (n < 10_000 ? format(Math.round(n), {}) : format(n, { notation: "compact", maximumSignificantDigits: 3 }));

/** A rate, with as many digits as mean something. */
export const rate = (n) => (n >= 10_000 ? count(n) : format(n, { maximumFractionDigits: n < 10 ? 1 : 0 }));

/** A part of a whole, 0…1, as a number of percent. */
export const percent = (part) => format(part * 100, { maximumFractionDigits: part > 0 && part < 0.1 ? 1 : 0 });

const unit = (n, name, digits = 0) =>
  format(n, { style: "unit", unit: name, unitDisplay: "narrow", minimumFractionDigits: digits, maximumFractionDigits: digits });

/** A span of time, in words: 0.4s, 12s, 2m 5s. */
export function time(seconds) {
  if (seconds < 0.05) return unit(0, "second");
  if (seconds < 9.95) return unit(seconds, "second", 1);
  const whole = Math.round(seconds);
  if (whole < 60) return unit(whole, "second");
  const rest = whole % 60;
  return unit(Math.floor(whole / 60), "minute") + (rest && whole < 600 ? ` ${unit(rest, "second")}` : "");
}

/** The same where only whole seconds are known. */
export const wait = (seconds) => (seconds < 60 ? unit(Math.round(seconds), "second") : time(seconds));

/** An amount of memory. */
export function bytes(n) {
  const [size, name] = n >= 2 ** 30 ? [n / 2 ** 30, "GiB"] : [n / 2 ** 20, "MiB"];
  return `${format(size, { maximumFractionDigits: size < 10 ? 1 : 0 })} ${name}`;
}
