//! What rules of others may do, as far as their text says it.

use crate::capture::iptables;
use crate::capture::layout::{Entry, Layout};
use crate::capture::rules::Verdict;

/// Targets after which the next rule sees the packet.
const PASSING: [&str; 13] = [
    "AUDIT", "CHECKSUM", "CLASSIFY", "CONNMARK", "CT", "DSCP", "LOG", "MARK", "NFLOG", "SET",
    "TCPMSS", "TRACE", "TTL",
];
/// Targets that take a packet from the rules that follow.
const TAKING: [&str; 9] = [
    "ACCEPT", "DNAT", "DROP", "NETMAP", "NFQUEUE", "REDIRECT", "REJECT", "RETURN", "TPROXY",
];

/// Whether a rule can keep a packet from the rules that follow. A jump to a chain of others can.
pub(super) fn may_take(entry: &Entry) -> bool {
    match entry {
        Entry::Rule { verdict, .. } => !matches!(
            verdict,
            Verdict::SetMark(_) | Verdict::SaveMark | Verdict::RestoreMark | Verdict::Zone(_)
        ),
        // Those of nft are JSON.
        Entry::Foreign(text) if text.starts_with('[') => true,
        Entry::Foreign(text) => target(text).is_some_and(|(_, target)| !PASSING.contains(&target)),
    }
}

/// The rules, with those of others that are readable.
pub(super) fn readable_layout(layout: &Layout) -> Layout {
    let mut layout = layout.clone();
    for entry in layout.chains.values_mut().flatten() {
        *entry = readable(entry);
    }
    layout
}

/// A rule of others as one of the model, if only its comment or its target is none: what another target
/// takes is accepted or, by DROP and REJECT, dropped.
pub(super) fn readable(entry: &Entry) -> Entry {
    let Entry::Foreign(text) = entry else {
        return entry.clone();
    };
    let text = without_comment(text);
    let read = iptables::entry(&text);
    match (&read, target(&text)) {
        (Entry::Foreign(_), Some((matches, target))) if TAKING.contains(&target) => {
            let target = match target {
                "DROP" | "REJECT" => "DROP",
                _ => "ACCEPT",
            };
            iptables::entry(format!("{matches} -j {target}").trim_start())
        }
        _ => read,
    }
}

/// The text up to the target, and the target's name.
fn target(text: &str) -> Option<(&str, &str)> {
    let at = [" -j ", " -g "]
        .iter()
        .find_map(|option| text.rfind(option));
    let (matches, rest) = match at {
        Some(at) => (&text[..at], &text[at + 4..]),
        None => ("", text.strip_prefix("-j ").or(text.strip_prefix("-g "))?),
    };
    Some((matches, rest.split(' ').next()?))
}

/// Cuts a comment out. One with blanks stands in quotes.
fn without_comment(text: &str) -> String {
    let text = text.replace(r#"\""#, "");
    let Some((before, comment)) = text.split_once("-m comment --comment ") else {
        return text;
    };
    let end = match comment.strip_prefix('"') {
        Some(quoted) => quoted.split_once("\" "),
        None => comment.split_once(' '),
    };
    format!("{before}{}", end.map_or("", |(_, after)| after))
}
