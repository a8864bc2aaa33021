"use strict";
// What is known of a token is shown beside it on hover and on focus. A list of tokens is one stop of the Tab key;
// arrow keys go on inside it, so that a keyboard need not pass a thousand of them.
(() => {
  const tip = document.getElementById("tip");
  const gap = 6;
  let owner = null;
  let timer = 0;
  document.documentElement.classList.add("js");

  function place(box) {
    const wide = tip.offsetWidth, high = tip.offsetHeight;
    const left = Math.min(Math.max(8, box.left), document.documentElement.clientWidth - wide - 8);
    const below = box.bottom + gap + high <= window.innerHeight;
    // while the page still scrolls to it, the token itself may be out of sight
    const top = below ? box.bottom + gap : Math.min(box.top - gap - high, window.innerHeight - high - 8);
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${Math.max(8, top)}px`;
  }

  function show(token) {
    clearTimeout(timer);
    if (owner === token) return;
    hide();
    const told = document.getElementById(token.dataset.tip);
    if (!told) return;
    owner = token;
    token.classList.add("shown");
    tip.replaceChildren(...[...told.childNodes].map((node) => node.cloneNode(true)));
    tip.hidden = false;
    place(token.getClientRects()[0]);
  }

  function hide() {
    clearTimeout(timer);
    if (owner) owner.classList.remove("shown");
    owner = null;
    tip.hidden = true;
  }

  function hideSoon() {
    clearTimeout(timer);
    timer = setTimeout(() => {
      const focused = document.activeElement;
      if (focused && focused.dataset.tip && focused.matches(":focus-visible")) show(focused);
      else hide();
    }, 150);
  }

  function stop(walk, token) {
    for (const other of walk.querySelectorAll('.tok[tabindex="0"]')) other.tabIndex = -1;
    token.tabIndex = 0;
  }

  function stepOf(token) {
    return token.closest("[data-step]");
  }

  function nextStep(walk, token, way) {
    const steps = [...walk.querySelectorAll("[data-step]")];
    const there = steps[steps.indexOf(stepOf(token)) + way];
    return there && there.querySelector(".tok");
  }

  function goal(walk, token, key) {
    const tokens = [...walk.querySelectorAll(".tok")];
    const here = tokens.indexOf(token);
    if (key === "ArrowRight") return tokens[here + 1];
    if (key === "ArrowLeft") return tokens[here - 1];
    if (key === "Home") return tokens[0];
    if (key === "End") return tokens[tokens.length - 1];
    if (key === "ArrowDown") return nextStep(walk, token, 1);
    if (key === "ArrowUp") return nextStep(walk, token, -1);
    return null;
  }

  for (const walk of document.querySelectorAll(".walk")) {
    for (const token of walk.querySelectorAll(".tok")) token.tabIndex = -1;
    const first = walk.querySelector(".tok");
    if (first) first.tabIndex = 0;
    walk.addEventListener("keydown", (event) => {
      const token = event.target.closest(".tok");
      if (!token || event.altKey || event.ctrlKey || event.metaKey) return;
      if ((event.key === "Enter" || event.key === " ") && token.dataset.go) {
        event.preventDefault();
        document.getElementById(token.dataset.go).focus();
        return;
      }
      const next = goal(walk, token, event.key);
      if (next) {
        event.preventDefault();
        next.focus();
      }
    });
    walk.addEventListener("focusin", (event) => {
      const token = event.target.closest(".tok");
      if (token) { stop(walk, token); show(token); }
    });
    walk.addEventListener("focusout", hideSoon);
    walk.addEventListener("pointerover", (event) => {
      const token = event.target.closest(".tok");
      if (token) show(token);
    });
    walk.addEventListener("pointerout", hideSoon);
    walk.addEventListener("click", (event) => {
      const token = event.target.closest(".tok");
      if (token) token.focus();
    });
  }
  tip.addEventListener("pointerover", () => clearTimeout(timer));
  tip.addEventListener("pointerout", hideSoon);
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") hide(); });
  document.addEventListener("scroll", () => { if (owner) place(owner.getClientRects()[0]); }, { passive: true, capture: true });
  window.addEventListener("resize", () => { if (owner) place(owner.getClientRects()[0]); });
})();
