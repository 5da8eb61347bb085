//! Whole pages.
