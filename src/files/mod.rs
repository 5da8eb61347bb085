//! Files of volumes that other users or containers may share: reading, replacing, watching.

pub(crate) mod directory;
pub(crate) mod file_watch;
pub(crate) mod permission;
pub(crate) mod regular_file;
pub(crate) mod replace_file;
pub mod volume;
