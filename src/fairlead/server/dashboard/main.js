// The dashboard's entry point: passes the server's data to the modules that show it.

import { redrawChat, showModels } from "./chat.js";
import { setAttribute, setText } from "./element.js";
import { offerActions, redrawFleet, showFleet } from "./fleet.js";
import { askForKey } from "./key.js";
import { server } from "./server.js";
import { redrawTotals, showHistory, showTotals } from "./totals.js";
import { chooseFirstLanguage, chooseLanguage, currentLanguage, translate } from "./words.js";

const link = document.querySelector("#link");
const LINK_WORDS = { connecting: "linkConnecting", live: "linkLive", lost: "linkLost", key: "linkKey" };

function showLink(state = link.dataset.state) {
  setAttribute(link, "data-state", state);
  setText(document.querySelector("#link-words"), translate(LINK_WORDS[state]));
  if (state === "key") askForKey();
}

const language = document.querySelector("#language");
const theme = document.querySelector("#theme");
theme.value = globalThis.fairleadTheme.chosen;
theme.addEventListener("change", () => globalThis.fairleadTheme.choose(theme.value));
language.addEventListener("change", () => chooseLanguage(language.value));
document.addEventListener("languagechange", () => {
  showLink();
  redrawTotals();
  redrawFleet();
  redrawChat();
});

chooseFirstLanguage();
language.value = currentLanguage();
redrawTotals();
redrawChat();
showLink();
server.follow({
  history: showHistory,
  snapshot(snapshot) {
    showTotals(snapshot);
    showFleet(snapshot);
    showModels(snapshot);
  },
}, showLink, offerActions);
