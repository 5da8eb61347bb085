//! Reduces lines to the fields of a known form: of logs, of statistics, and of `iptables-save`.

use serde_json::Value;

use super::{copy_json, is_name};
use crate::logging::{code_of, scope_of};

/// Options of iptables whose values are addresses, interfaces, ports, users, marks, states and targets.
const OPTIONS: &str = "
-A -d -f -g -i -j -m -o -p -s --ctmask --ctstate --dport --dports --dst-type --gid-owner --icmp-type
--icmpv6-type --mark --nfmask --nodst-type --notrack --on-ip --on-port --random-fully --reject-with
--restore-mark --save-mark --set-mark --set-xmark --socket-exists --sport --sports --src-range
--src-type --state --syn --tcp-flags --to-destination --to-ports --to-source --tproxy-mark
--uid-owner --zone";

/// Keeps time, level and scope of a line of the log, as text or JSON, the place in Envoy's source, and the text of a
/// problem code. Messages and labels may quote anything.
pub(crate) fn log(line: &str) -> Option<String> {
    let json: Value = serde_json::from_str(line).unwrap_or_default();
    let mut columns = line.split('\t').chain([""; 3]);
    let [time, level, scope] = ["time", "level", "scope"].map(|name| {
        columns.next().filter(|_| json.is_null()).or(json[name].as_str()).unwrap_or("")
    });
    let is_time = time.starts_with("20") && time.bytes().all(|it| b"0123456789-:.TZ".contains(&it));
    if !is_time || !["debug", "info", "warn", "warning", "error", "critical"].contains(&level) {
        return None;
    }
    // A line of the scope `default` has its message in place of the scope.
    let scope = Some(scope).filter(|it| scope_of(it) == *it || is_place_in_envoy(it));
    let problem = code_of(line).map(|code| format!("{} [{}]", code.cause(), code.name()));
    let kept = [Some(time), Some(level), scope, problem.as_deref()];
    Some(Vec::from_iter(kept.into_iter().flatten()).join("\t"))
}

/// Recognizes a component of Envoy with file and line, such as `envoy main source/server/server.cc:933`.
fn is_place_in_envoy(column: &str) -> bool {
    let words: Vec<_> = column.split(' ').collect();
    let ["envoy", component, place] = &*words else { return false };
    let source = place.rsplit_once(':').filter(|(_, line)| line.parse::<u32>().is_ok());
    let is_source = source.is_some_and(|(file, _)| file.ends_with(".cc") || file.ends_with(".h"));
    is_source && is_name(place) && component.bytes().all(|it| it.is_ascii_lowercase() || it == b'_')
}

/// Keeps a statistic of Envoy that is a number or a histogram. Of Istio's own statistics the names have values of
/// attributes, which a Telemetry resource may take from headers.
pub(crate) fn statistic(line: &str) -> Option<String> {
    let (name, value) = line.split_once(": ")?;
    let is_of_attributes = ["istiocustom.", "wasmcustom."].iter().any(|it| name.starts_with(it));
    let is_value = value.bytes().all(|it| it.is_ascii_digit() || b"P(),. nae+-".contains(&it));
    (is_name(name) && !is_of_attributes && is_value).then(|| line.to_owned())
}

/// Keeps a sample of the agent's metrics, and its type.
pub(crate) fn metric(line: &str) -> Option<String> {
    let sample = line.rsplit_once(' ').filter(|(_, value)| value.parse::<f64>().is_ok());
    let series = sample.or_else(|| line.strip_prefix("# TYPE ")?.rsplit_once(' '))?.0;
    let is_own = series.starts_with("istio_agent_");
    (is_own && is_name(&series.replace(['{', '}', '=', '"'], ""))).then(|| line.to_owned())
}

/// Keeps what a command has printed of the rules of traffic capture.
pub(crate) fn rules(command: &str, printed: &[u8], left_out: &mut u64) -> String {
    if !command.starts_with("nft ") {
        return iptables(&String::from_utf8_lossy(printed), left_out);
    }
    let mut json = Vec::new();
    // After an error, the part before it stays.
    let _ = copy_json("Ruleset", printed, &mut json, left_out);
    json.push(b'\n');
    String::from_utf8(json).unwrap_or_default()
}

/// Keeps tables, chains, and the known options of rules of `iptables-save`. Comments and prefixes of logs are texts.
fn iptables(text: &str, left_out: &mut u64) -> String {
    let mut kept = String::new();
    for line in unquoted_split(text, '\n').filter(|line| !line.is_empty()) {
        let reduced = match line.strip_prefix('-') {
            Some(_) => options(line),
            None if line.starts_with(['*', ':']) || line == "COMMIT" => line.to_owned(),
            None => String::new(),
        };
        *left_out += u64::from(reduced != line);
        if !reduced.is_empty() && is_name(&reduced) {
            kept += &format!("{reduced}\n");
        }
    }
    kept
}

/// Keeps the known options of a rule, with their values.
fn options(rule: &str) -> String {
    let (mut kept, mut is_listed, mut before) = (Vec::new(), false, "");
    for word in unquoted_split(rule, ' ') {
        if word.starts_with('-') {
            is_listed = OPTIONS.split_whitespace().any(|listed| listed == word);
            kept.extend(Some(before).filter(|before| is_listed && *before == "!"));
        }
        kept.extend(Some(word).filter(|word| is_listed && *word != "!" && is_name(word)));
        before = word;
    }
    kept.join(" ")
}

/// Splits a text where it is not quoted.
fn unquoted_split(text: &str, separator: char) -> impl Iterator<Item = &str> {
    let (mut is_quoted, mut is_escaped) = (false, false);
    text.split(move |c| {
        is_quoted ^= c == '"' && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        c == separator && !is_quoted
    })
}
