// Light or dark. A classic script in the head, so that the page never shows the wrong one first.
"use strict";

const theme = {
  /** What was chosen: "light", "dark", or "auto" for what the system says. */
  get chosen() {
    try {
      return localStorage.getItem("fairlead-theme") ?? "auto";
    } catch { // storage can be forbidden; the page works without
      return "auto";
    }
  },

  choose(name) {
    try {
      localStorage.setItem("fairlead-theme", name);
    } catch { /* as above: then it holds until the page is left */ }
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
