// The dashboard's entry point: passes the server's data to the modules that show it.

import { sayChatAgain, showModels } from "./chat.js";
import { mark, put } from "./element.js";
import { sayFleetAgain, showFleet } from "./fleet.js";
import { askForKey } from "./key.js";
import { server } from "./server.js";
import { sayTotalsAgain, showHistory, showTotals } from "./totals.js";
import { chooseFirstLanguage, chooseLanguage, currentLanguage, say } from "./words.js";

const link = document.querySelector("#link");
const LINK_WORDS = { connecting: "linkConnecting", live: "linkLive", lost: "linkLost", key: "linkKey" };

function showLink(state = link.dataset.state) {
  mark(link, "data-state", state);
  put(document.querySelector("#link-words"), say(LINK_WORDS[state]));
  if (state === "key") askForKey();
}

const language = document.querySelector("#language");
const theme = document.querySelector("#theme");
theme.value = globalThis.fairleadTheme.chosen;
theme.addEventListener("change", () => globalThis.fairleadTheme.choose(theme.value));
language.addEventListener("change", () => chooseLanguage(language.value));
document.addEventListener("languagechange", () => {
  showLink();
  sayTotalsAgain();
  sayFleetAgain();
  sayChatAgain();
});

chooseFirstLanguage();
language.value = currentLanguage();
sayTotalsAgain();
sayChatAgain();
showLink();
server.follow({
  history: showHistory,
  snapshot(snapshot) {
    showTotals(snapshot);
    showFleet(snapshot);
    showModels(snapshot);
  },
}, showLink);
