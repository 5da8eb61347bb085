//! The section of the page on Wasm modules. It is left out where there are none.

use maud::{Markup, html};

use super::format::{duration, size};
use super::page::{BAD, GOOD, WARN, Width, badge, card, list, note};
use crate::wasm::Snapshot;

pub(super) fn section(snapshot: &Snapshot) -> Option<Markup> {
    let Snapshot {
        modules,
        fetching,
        failures,
    } = snapshot;
    if modules.is_empty() && fetching.is_empty() && failures.is_empty() {
        return None;
    }
    let content = html! {
        (list(&["Module", "State", "Size"], html! {
            @for failure in failures {
                tr {
                    td { (failure.url) (note(&failure.resource)) }
                    td {
                        (badge(BAD, "missing")) (note(&failure.error))
                        (note(format!("next attempt in {}", duration(failure.retry_seconds))))
                    }
                    td {}
                }
            }
            @for url in fetching {
                tr { td { (url) } td { (badge(WARN, "under way")) } td {} }
            }
            @for module in modules {
                tr {
                    td { (module.url) (note(&module.checksum)) }
                    td {
                        @if module.resources.is_empty() {
                            "unused for " (duration(module.unused_seconds))
                        } @else {
                            (badge(GOOD, "in use")) (note(module.resources.join(", ")))
                        }
                    }
                    td { (size(module.size_bytes)) }
                }
            }
        }))
    };
    Some(card(Width::Page, "Wasm modules", "wasm", content))
}
