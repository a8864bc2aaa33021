"""The command line `dflash-fn`; nothing else in the library imports it.

Reading order: `main` (commands and flags) · `options` (checks) · `generate`, `chat`, `ports`, `doctor` (one file a
command) · `pairs` (loading) · `answer` (decoding to text, with times) · `check`, `prove` (with and without a draft) ·
`report` (JSON) · `render` (for people) · `terminal` (streams) · `exits` (exit codes) · `machine` (facts for doctor).

Text and JSON go to stdout, everything else to stderr. Frameworks are imported when a pair is loaded, not before.
"""
