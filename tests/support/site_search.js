// Search a built site as its page does: node site_search.js SITE < QUERIES, a JSON list of texts.
// Prints a JSON list: of each query the pages and anchors that are found, the best first.
const fs = require("fs");
const vm = require("vm");

const site = process.argv[2];
const page = { getElementById: () => null, documentElement: { dataset: {} } };
const context = vm.createContext({ document: page, _: (text) => text, _ready: () => null, SPHINX_HIGHLIGHT_ENABLED: false });
context.window = context;
const scripts = ["documentation_options", "language_data", "searchtools"].map((name) => `_static/${name}.js`);
for (const script of [...scripts, "searchindex.js"])
  vm.runInContext(fs.readFileSync(`${site}/${script}`, "utf8"), context, script);
context.queries = JSON.parse(fs.readFileSync(0, "utf8"));
const found = vm.runInContext("queries.map((query) => Search._performSearch(...Search._parseQuery(query)).reverse())", context);
console.log(JSON.stringify(found.map((results) => results.map(([page, , anchor]) => page + anchor))));
