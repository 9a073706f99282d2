"""Damaged and hostile input for everything that is read from a file, a folder or a command line.

`mutation`, `trees`, `pickles`, `containers` make inputs; `pixels`, `sets`, `runs`, `weights`, `words` say who reads them;
`harness` and `watch` see what becomes of each; `service` runs many. docs/fuzz.md has the figures.
"""
