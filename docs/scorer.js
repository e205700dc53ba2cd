// How the site's search orders what it finds: Sphinx's own values, except that a heading of the
// pages about errors comes first. Its title is an error message, and somebody has just pasted it.
// If pages have the same score, those about errors come first, too.
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    const errors = ["docs/troubleshooting", "docs/nccl-hangs"].includes(docname);
    return errors ? score + (kind === "title" ? 100 : 1) : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
