// Light or dark theme. A classic script in the head, so that the page is never drawn in the other theme first.
"use strict";

const theme = {
  /** The chosen theme: "light", "dark", or "auto" for the system's. */
  get chosen() {
    try {
      return localStorage.getItem("fairlead-theme") ?? "auto";
    } catch { // storage can be disabled; the page works without it
      return "auto";
    }
  },

  choose(name) {
    try {
      localStorage.setItem("fairlead-theme", name);
    } catch { /* as above: then it holds until the page is closed */ }
    theme.apply(name);
  },

  apply(name) {
    if (name === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = name;
    dispatchEvent(new Event("themechange"));
  },
};

theme.apply(theme.chosen);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("themechange")));
globalThis.fairleadTheme = theme;
