//! Lines in, lines out.
