// Settings by a word of their line; all of them on paper.
"use strict";
const search = document.querySelector("input[type=search]");
const fold = document.querySelector("details");
search.addEventListener("input", () => {
  const word = search.value.trim().toLowerCase();
  for (const row of document.querySelectorAll(".setting")) {
    row.hidden = !row.textContent.toLowerCase().includes(word);
  }
  fold.open = word !== "";
});
window.addEventListener("beforeprint", () => { fold.open = true; });
