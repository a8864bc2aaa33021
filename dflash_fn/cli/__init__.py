"""The command line `dflash-fn`; nothing else in the library imports it.

Reading order: `main` (the entry point) · `commands` (with their flags) · `options` (checks) · `generate`, `chat`,
`ports`, `doctor`, `trace`, `trace_view`, `policies` (one file a command) · `pairs` (loading) · `answer` (decoding to
text, with times) · `check`, `prove` (with and without a draft) · `saved` (states in files) · `report`, `trace_report`,
`policies_report` (JSON) · `render` (for people) · `terminal` (how it is shown) · `stdin`, `streams`, `signals` (what
the shell hands over and may take away) · `exits` (exit codes) · `machine` (facts for doctor).

Text and JSON go to stdout, everything else to stderr. Frameworks are imported when a pair is loaded, not before.
"""
