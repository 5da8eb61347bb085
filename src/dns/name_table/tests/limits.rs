//! Tests large name tables, names and fields that are ignored, and the JSON form.

use super::*;

#[test]
fn a_million_hosts_are_a_table() {
    let mut encoded = Vec::new();
    for number in 0..1_000_000_u32 {
        let host = format!("h{number}.x");
        let pair = [&[10, host.len() as u8], host.as_bytes(), &[18, 9, 10, 7], b"1.1.1.1"].concat();
        encoded.extend([&[10, pair.len() as u8], pair.as_slice()].concat());
    }
    let table = NameTable::build(&encoded, domains()).expect("a table");
    assert_eq!(table.host_count(), 1_000_000);
    assert!(found(&table, "h999999.x").is_some() && found(&table, "h1000000.x").is_none());
}

#[test]
fn names_that_cannot_be_asked_for_are_left_out() {
    let long = "a.".repeat(200) + "com";
    for host in ["", ".", "a.b.svc.cluster.local.", &long] {
        let table =
            NameTable::build(&encode([(host, kubernetes("", "", &["1.1.1.1"]))]), domains());
        let table = table.expect("a table");
        for name in ["", "a.b.svc.cluster.local", &long] {
            assert_eq!(found(&table, name), None, "{host:?} {name:?}");
        }
    }
}

#[test]
fn unknown_fields_of_a_host_are_ignored() {
    let info = [10, 7, b'1', b'.', b'1', b'.', b'1', b'.', b'1', 50, 1, 0xff];
    let pair = [&[10, 1, b'a', 18, info.len() as u8], &info[..]].concat();
    let encoded = [&[10, pair.len() as u8], &pair[..]].concat();
    let table = NameTable::build(&encoded, domains()).expect("a table");
    let expected = Some((None, vec!["1.1.1.1".parse().unwrap()]));
    assert_eq!(found(&table, "a"), expected);
}

#[test]
fn unknown_fields_of_the_name_table_are_ignored_and_incremental_tables_refused() {
    let table = encode([("a", external(&["1.1.1.1"]))]);
    // The tag of the field, its content, and true if the table is accepted.
    for (tag, content, is_table) in [
        (3 << 3 | 2, &[1, 0xff][..], true),
        (9 << 3, &[7], true),
        // Field 2 as a number, not as a message.
        (2 << 3, &[7], true),
        (2 << 3 | 2, &[0], false),
        (2 << 3 | 2, &[3, 10, 1, b'a'], false),
    ] {
        let field = [&[tag], content].concat();
        for encoded in [[&table[..], &field].concat(), [&field, &table[..]].concat()] {
            let built = NameTable::build(&encoded, domains());
            if is_table {
                assert!(found(&built.expect("a table"), "a").is_some(), "{field:?}");
            } else {
                assert_eq!(built.err(), Some(host::DELTA), "{field:?}");
            }
        }
        let alone = NameTable::build(&field, domains());
        assert_eq!(alone.is_ok(), is_table, "{field:?}");
    }
}

#[test]
fn a_malformed_name_table_is_refused_with_the_reason() {
    for (encoded, expected) in [
        (&[0x0f][..], "a field is malformed or incomplete"),
        (&[0x0a, 5, 1], "a field is malformed or incomplete"),
        (&[0x0a, 3, 0x0a, 1, 0xff], "a string is not UTF-8"),
        (&[0x0a, 0x80], "a field is malformed or incomplete"),
    ] {
        let error = NameTable::build(encoded, domains()).expect_err("no table").to_string();
        assert_eq!(error, expected);
    }
}

#[test]
fn the_debug_dump_shows_the_received_table_and_derived_names() {
    let mut product = kubernetes("Page", "ns1", &["9.9.9.9", "bad", "::1"]);
    product.alt_hosts = vec!["page.example.com".into()];
    let table = encode([
        ("Page.ns1.svc.cluster.local", product),
        ("www.google.com", external(&["1.1.1.1"])),
        ("empty.com", NameInfo::default()),
    ]);
    let table = NameTable::build(&table, domains()).expect("a table");
    let both = serde_json::json!({"ips": ["9.9.9.9", "::1"], "registry": "Kubernetes"});
    let expected = serde_json::json!({"table": {
        "Page.ns1.svc.cluster.local": {
            "ips": ["9.9.9.9", "bad", "::1"], "registry": "Kubernetes", "shortname": "Page",
            "namespace": "ns1", "altHosts": ["page.example.com"],
        },
        "www.google.com": {"ips": ["1.1.1.1"], "registry": "External"},
        "empty.com": {},
        "page.ns1.svc.cluster.local.": both,
        "page.ns1.svc.": both,
        "page.ns1.": both,
        "page.": both,
        "page.example.com.": both,
        "www.google.com.": {"ips": ["1.1.1.1"], "registry": "Kubernetes"},
    }});
    let shown: serde_json::Value = serde_json::from_str(&table.to_json()).expect("JSON");
    assert_eq!(shown, expected);
    let empty = NameTable::build(&[], domains()).expect("a table");
    assert_eq!(empty.to_json(), "{}");
}
