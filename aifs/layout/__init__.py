"""Pure arithmetic: which bytes of a file lie where. No I/O, no state. Imports core."""
