//! Records for the standby the arguments and the environment of the agent that serves, and its deliberate exit.

use std::collections::BTreeMap;
use std::io;

use rustix::time::{ClockId, clock_gettime};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::config::environment::Environment;
use crate::files::directory::Directory;
use crate::files::regular_file::if_exists;

pub(super) const RECORD: &str = "serving.json";
pub(super) const END: &str = "end.json";

/// The arguments and the environment of the agent that serves. Variables may be secret: only the agents' user may read
/// the record.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Record {
    /// The arguments without the program.
    pub arguments: Vec<String>,
    /// The environment variables, all of them because Envoy inherits them.
    pub variables: BTreeMap<String, String>,
}

/// An exit that the pod's owner has requested, or that Envoy's own exit without an error has caused. It is not a crash
/// and not the replacement of a container.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub(super) struct End {
    /// Nanoseconds since the machine started.
    at: u64,
}

impl Record {
    pub(super) fn from_process(environment: &Environment) -> Self {
        let words = std::env::args_os().skip(1);
        Self {
            arguments: words.map(|word| word.to_string_lossy().into_owned()).collect(),
            variables: variables(environment).collect(),
        }
    }

    /// Returns the environment of a standby that takes over: the recorded variables, replaced by variables of its own
    /// container, such as limits and the container's name.
    pub fn environment(&self, own: &Environment) -> BTreeMap<String, String> {
        let mut merged = self.variables.clone();
        merged.extend(variables(own));
        merged
    }
}

fn variables(environment: &Environment) -> impl Iterator<Item = (String, String)> {
    environment.with_prefix("").map(|(name, value)| (name.to_owned(), value.to_owned()))
}

impl End {
    pub(super) fn now() -> Self {
        Self { at: since_boot() }
    }

    /// Returns the end of the former agent if it was recorded after `start`. A process that started later must not exit
    /// because of it.
    pub(super) fn after(start: u64, directory: &Directory) -> io::Result<Option<Self>> {
        let end: Option<Self> = read(directory, END)?;
        Ok(end.filter(|end| end.at > start))
    }
}

pub(super) fn write(directory: &Directory, name: &str, value: &impl Serialize) -> io::Result<()> {
    directory.replace_files(&[(name, &serde_json::to_vec(value)?)], 0o600)
}

/// Reads a record. Returns None if there is no such file.
pub(super) fn read<T: DeserializeOwned>(
    directory: &Directory,
    name: &str,
) -> io::Result<Option<T>> {
    let text = if_exists(directory.read_private(name))?;
    Ok(text.map(|text| serde_json::from_slice(&text)).transpose()?)
}

/// Returns the nanoseconds since the machine started, which are the same in all its containers (clock_gettime(2),
/// CLOCK_BOOTTIME).
pub(super) fn since_boot() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    // Neither part is negative.
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_of_the_standbys_own_container_win() {
        let variables = [("ISTIO_CPU_LIMIT", "2"), ("POD_NAME", "cart-1")];
        let record = Record {
            arguments: vec!["proxy".to_owned()],
            variables: variables.map(|(name, value)| (name.to_owned(), value.to_owned())).into(),
        };
        let own = [("ISTIO_CPU_LIMIT", "1"), ("ISTIO_AGENT_STANDBY", "istio-standby")];
        let merged = record.environment(&own.into_iter().collect());
        let merged: Vec<_> = merged.iter().map(|(name, value)| (&**name, &**value)).collect();
        assert_eq!(merged, [own[1], own[0], variables[1]]);
    }

    #[test]
    fn an_end_counts_only_for_a_process_that_was_running() {
        let place = tempfile::tempdir().unwrap();
        let directory = Directory::private(place.path(), "private", true).unwrap();
        assert_eq!(End::after(0, &directory).unwrap(), None);
        let before = since_boot();
        let end = End::now();
        write(&directory, END, &end).unwrap();
        assert_eq!(End::after(before, &directory).unwrap(), Some(end));
        assert_eq!(End::after(since_boot(), &directory).unwrap(), None);
    }

    #[test]
    fn a_record_is_private_to_its_user_and_a_broken_one_fails() {
        let place = tempfile::tempdir().unwrap();
        let directory = Directory::private(place.path(), "private", true).unwrap();
        assert_eq!(read::<Record>(&directory, RECORD).unwrap(), None);
        let record = Record::from_process(&[("TOKEN", "secret")].into_iter().collect());
        write(&directory, RECORD, &record).unwrap();
        assert_eq!(read(&directory, RECORD).unwrap(), Some(record));
        let file = place.path().join("private").join(RECORD);
        let mode = std::os::unix::fs::MetadataExt::mode(&file.metadata().unwrap());
        assert_eq!(mode & 0o777, 0o600);
        std::fs::write(file, "{").unwrap();
        assert!(read::<Record>(&directory, RECORD).is_err());
    }
}
