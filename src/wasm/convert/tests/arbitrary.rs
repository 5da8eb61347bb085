//! Tests the conversion with arbitrary bytes.

use proptest::prelude::*;

use super::*;

/// Generates nested messages with the field numbers that the conversion reads.
fn nested() -> impl Strategy<Value = Vec<u8>> {
    let leaf = prop_oneof![
        prop::collection::vec(any::<u8>(), 0..12),
        prop::sample::select(vec![HTTP, NETWORK, OUTER, TYPED_STRUCT]).prop_map(Vec::from),
    ];
    leaf.prop_recursive(7, 60, 4, |inner| {
        prop::collection::vec((1u32..9, inner), 0..4).prop_map(|fields| {
            let mut message = Vec::new();
            for (number, content) in fields {
                wire::append(&mut message, number, &content);
            }
            message
        })
    })
}

proptest! {
    #[test]
    fn any_bytes_are_a_filter_or_none_and_only_modules_are_replaced(
        value in nested(),
        type_url in prop::sample::select(vec![HTTP, NETWORK, TYPED_STRUCT, "other"]),
        wraps in 0..3,
    ) {
        let resource = match wraps {
            0 => value.into(),
            1 => encoded(OUTER, value),
            _ => extension(type_url, value),
        };
        if let Ok(Some(found)) = read_filter(&resource) {
            if let Ok(rewritten) = found.with_module("/data/a.wasm") {
                // A rewritten filter has a local module, and so is not rewritten again.
                prop_assert!(matches!(read_filter(&rewritten), Ok(None)));
            }
            if let Ok(fallback) = found.fallback() {
                prop_assert!(matches!(read_filter(&fallback), Ok(None)));
            }
        }
    }

    #[test]
    fn a_message_is_the_sum_of_its_fields(bytes in prop::collection::vec(any::<u8>(), 0..60)) {
        let bytes = Bytes::from(bytes);
        if let Ok(fields) = wire::fields(&bytes) {
            let records: Vec<_> = fields.into_iter().map(|field| field.record).collect();
            prop_assert_eq!(records.concat(), bytes);
        }
    }
}
