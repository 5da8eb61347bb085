//! Reads JSON like Go, where null stands for an absent value.

use serde::de::DeserializeOwned;
use serde_json::{Error, Value};

/// Reads a document. A member or an element that is null counts as absent.
pub(crate) fn read<T: DeserializeOwned>(text: impl AsRef<[u8]>) -> Result<T, Error> {
    let mut value = serde_json::from_slice(text.as_ref())?;
    remove_null(&mut value);
    serde_json::from_value(value)
}

/// Removes members and elements that are null. Returns false if the value itself is null.
pub(crate) fn remove_null(value: &mut Value) -> bool {
    match value {
        Value::Object(members) => members.retain(|_, member| remove_null(member)),
        Value::Array(elements) => elements.retain_mut(remove_null),
        _ => {}
    }
    !value.is_null()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn null_members_are_removed_at_any_depth() {
        let mut given =
            json!({"a": null, "b": [null, {"c": null, "d": [[null], 1]}], "e": "null", "f": false});
        let expected = json!({"b": [{"d": [[], 1]}], "e": "null", "f": false});
        assert!(remove_null(&mut given) && !remove_null(&mut Value::Null));
        assert_eq!(given, expected);
    }
}
