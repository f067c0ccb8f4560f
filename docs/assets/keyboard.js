"use strict";
// Lets a keyboard scroll wide tables and code: the theme wraps the tables, and takes code out of reach without a mouse.
(() => {
  const reach = () => document.querySelectorAll(".md-typeset__scrollwrap, pre > code").forEach((node) => {
    if (!node.hasAttribute("tabindex")) node.setAttribute("tabindex", "0");
  });
  new MutationObserver(reach).observe(document.body, {
    subtree: true, childList: true, attributes: true, attributeFilter: ["tabindex"],
  });
  reach();
})();
