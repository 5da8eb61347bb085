//! Tests secret files with arbitrary content.

use proptest::prelude::*;

use super::*;

proptest! {
    /// Arbitrary files cause an error or are used, but a chain and a key that do not match are never used.
    #[test]
    fn arbitrary_files_do_no_harm(
        chain in pem_like(),
        key in pem_like(),
        cut in 0..2000_usize,
        flip in 0..2000_usize,
    ) {
        let directory = tempfile::tempdir().unwrap();
        let (good, good_key) = generated();
        let mut damaged = good.clone().into_bytes();
        if let Some(byte) = damaged.get_mut(flip) {
            *byte ^= 1;
        }
        damaged.truncate(cut);
        let pair = |chain: &[u8], key: &[u8]| {
            let [chain_path, key_path] = ["c", "k"].map(|name| directory.path().join(name));
            fs::write(&chain_path, chain).unwrap();
            fs::write(&key_path, key).unwrap();
            Source::Pair { chain: chain_path, key: key_path }.read()
        };
        prop_assert!(pair(good.as_bytes(), good_key.as_bytes()).is_ok());
        prop_assert!(pair(&chain, &key).is_err());
        prop_assert!(pair(good.as_bytes(), &key).is_err());
        // A damaged certificate may still be readable, so the test only requires that no panic occurs.
        drop(pair(&damaged, good_key.as_bytes()));
        let path = directory.path().join("r");
        fs::write(&path, [&chain[..], &damaged, &key].concat()).unwrap();
        drop(Source::Roots(path).read());
    }
}

fn pem_like() -> impl Strategy<Value = Vec<u8>> {
    let label = prop_oneof!["CERTIFICATE", "PRIVATE KEY", "EC PRIVATE KEY", "RSA PRIVATE KEY", "X"];
    let block = (label, "[A-Za-z0-9+/=\n ]{0,200}").prop_map(|(label, text)| {
        format!("-----BEGIN {label}-----\n{text}\n-----END {label}-----\n").into_bytes()
    });
    prop_oneof![block, proptest::collection::vec(any::<u8>(), 0..300)]
}
