// Points of what the site's search finds; Sphinx's own, but for the last function.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  // Pages that have the same words: guides come first, pages that name everything come last.
  score: ([page, , , , points, , kind]) => {
    if (kind !== "text") return points;
    if (/^(guides|start)\//.test(page)) return points + 1;
    return /^(changes|contributing|questions|reading|tests|from-the-old-readme|reference\/glossary)$/.test(page) ? points - 1 : points;
  },
};
