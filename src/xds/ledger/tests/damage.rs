use std::fs;

use proptest::prelude::*;

use super::*;

/// Writes a file with three records, and returns its bytes.
fn written(parent: &Path) -> Vec<u8> {
    let mut pod = Pod::start(parent);
    pod.accept_first(&resources(&[("a", "1"), ("b", "1")]));
    assert!(pod.write());
    for nonce in ["2", "3"] {
        pod.accept(Type::CLUSTER, nonce, &resources(&[("a", nonce)]), &[]);
        assert!(pod.write());
    }
    fs::read(parent.join(DIRECTORY).join(FILE)).unwrap()
}

fn read_bytes(parent: &Path, bytes: &[u8]) -> io::Result<Option<(Store, Record)>> {
    let path = parent.join(DIRECTORY).join(FILE);
    fs::write(&path, bytes).unwrap();
    file::read(parent, u64::MAX)
}

#[tokio::test(start_paused = true)]
async fn a_file_cut_anywhere_has_its_last_record_or_is_not_used() {
    let parent = tempfile::tempdir().unwrap();
    let bytes = written(parent.path());
    let mut found = Vec::new();
    for length in 0..=bytes.len() {
        if let Ok(Some((mut store, _))) = read_bytes(parent.path(), &bytes[..length]) {
            let all = contents_of(&mut store, Type::CLUSTER);
            assert_eq!(all["b"], "1");
            found.push(all["a"].clone());
        }
    }
    found.dedup();
    assert_eq!(found, ["1", "2", "3"]);
}

#[tokio::test(start_paused = true)]
async fn a_flipped_bit_before_the_last_record_is_never_served() {
    let parent = tempfile::tempdir().unwrap();
    let bytes = written(parent.path());
    let states = ["1", "2", "3"].map(|a| resources(&[("a", a), ("b", "1")]));
    for at in 0..bytes.len() {
        let mut damaged = bytes.clone();
        damaged[at] ^= 1 << fastrand::u32(..8);
        if let Ok(Some((mut store, _))) = read_bytes(parent.path(), &damaged) {
            // A length that points behind the end looks like a write that was cut off.
            let all = contents_of(&mut store, Type::CLUSTER);
            assert!(states.contains(&all), "{at}");
        }
    }
}

proptest! {
    #[test]
    fn arbitrary_files_do_no_harm(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        has_magic in any::<bool>(),
    ) {
        let parent = tempfile::tempdir().unwrap();
        Directory::private(parent.path(), DIRECTORY, true).unwrap();
        let magic: &[u8] = if has_magic { b"istio-agent configuration 1\n" } else { b"" };
        let _ = read_bytes(parent.path(), &[magic, &bytes].concat());
    }

    #[test]
    fn files_with_arbitrary_changes_do_no_harm(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..20),
    ) {
        let parent = tempfile::tempdir().unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut bytes = runtime.block_on(async { written(parent.path()) });
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        let _ = read_bytes(parent.path(), &bytes);
    }
}

#[tokio::test(start_paused = true)]
async fn a_file_larger_than_allowed_is_not_used() {
    let parent = tempfile::tempdir().unwrap();
    let length = written(parent.path()).len() as u64;
    assert!(file::read(parent.path(), length).unwrap().is_some());
    assert!(file::read(parent.path(), length - 1).is_err());
}
