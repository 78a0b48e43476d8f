"""The recurrence as functions: `naive` (the specification), `torch` (anywhere), `parallel` (Eq. 5), one dispatch."""
