// The page's texts in the user's language, and its number formats.

import en from "./words/en.js";
import ja from "./words/ja.js";
import zh from "./words/zh.js";

const languages = { en, ja, zh };
const STORAGE_NAME = "fairlead-language";
let language = "en";

/** Return the text for a key, with `{name}` filled in from `values`. */
export function translate(key, values = {}) {
  const words = languages[language][key] ?? en[key] ?? key;
  return words.replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
}

/** Return whether there is a text for this key, which may be anything that a server sent. */
export const hasText = (key) => Object.hasOwn(en, key);

export const currentLanguage = () => language;

/** Set the language chosen before, else the first of the browser's that is available. */
export function chooseFirstLanguage() {
  let stored = null;
  try {
    stored = localStorage.getItem(STORAGE_NAME);
  } catch { /* storage can be disabled */ }
  const wanted = [stored, ...navigator.languages].map((tag) => String(tag).slice(0, 2).toLowerCase());
  setLanguage(wanted.find((tag) => Object.hasOwn(languages, tag)) ?? "en");
}

/** Change the language: translate the marked elements, and dispatch `languagechange`. */
export function chooseLanguage(tag) {
  try {
    localStorage.setItem(STORAGE_NAME, tag);
  } catch { /* then it holds until the page is closed */ }
  setLanguage(tag);
  document.dispatchEvent(new Event("languagechange"));
}

function setLanguage(tag) {
  language = tag;
  document.documentElement.lang = tag === "zh" ? "zh-Hans" : tag;
  for (const element of document.querySelectorAll("[data-words]")) element.textContent = translate(element.dataset.words);
  for (const element of document.querySelectorAll("[data-placeholder]")) element.placeholder = translate(element.dataset.placeholder);
}

// Numbers --------------------------------------------------------------------------------------------

const formats = new Map();

function format(number, options) {
  const name = language + JSON.stringify(options);
  if (!formats.has(name)) formats.set(name, new Intl.NumberFormat(language, options));
  return formats.get(name).format(number);
}

/** Format a count; large ones in short: 12.3K, 1.23万. */
export const count = (n) => (n < 10_000 ? format(Math.round(n), {}) : format(n, { notation: "compact", maximumSignificantDigits: 3 }));

/** Format a rate, with as many digits as are significant. */
export const rate = (n) => (n >= 10_000 ? count(n) : format(n, { maximumFractionDigits: n < 10 ? 1 : 0 }));

/** Format a fraction, 0…1, as a percentage without its sign. */
export const percent = (part) => format(part * 100, { maximumFractionDigits: part > 0 && part < 0.1 ? 1 : 0 });

const unit = (n, name, digits = 0) =>
  format(n, { style: "unit", unit: name, unitDisplay: "narrow", minimumFractionDigits: digits, maximumFractionDigits: digits });

/** Format a duration: 0.4s, 12s, 2m 5s. */
export function time(seconds) {
  if (seconds < 0.05) return unit(0, "second");
  if (seconds < 9.95) return unit(seconds, "second", 1);
  const whole = Math.round(seconds);
  if (whole < 60) return unit(whole, "second");
  const rest = whole % 60;
  return unit(Math.floor(whole / 60), "minute") + (rest && whole < 600 ? ` ${unit(rest, "second")}` : "");
}

/** Format a duration below a second in milliseconds. */
export const milliseconds = (seconds) => `${format(seconds * 1000, { maximumFractionDigits: seconds < 0.01 ? 1 : 0 })} ms`;

/** Format a day, from seconds since 1970. */
export const date = (at) => new Intl.DateTimeFormat(language, { dateStyle: "medium" }).format(new Date(at * 1000));

/** Format a minute of a day, from seconds since 1970. */
export const moment = (at) => new Intl.DateTimeFormat(language, { dateStyle: "medium", timeStyle: "short" }).format(new Date(Math.round(at / 60) * 60_000));

/** Format a duration of which only whole seconds are known. */
export const wait = (seconds) => (seconds < 60 ? unit(Math.round(seconds), "second") : time(seconds));

/** Format an amount of memory. */
export function bytes(n) {
  const [size, name] = n >= 2 ** 30 ? [n / 2 ** 30, "GiB"] : [n / 2 ** 20, "MiB"];
  return `${format(size, { maximumFractionDigits: size < 10 ? 1 : 0 })} ${name}`;
}
