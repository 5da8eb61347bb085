//! The table for people, in the JSON of its messages: what istiod sent, and the forms made of it.
//!
//! Does not show expanded names, which are found by rule and without number.

use serde_json::{Map, Value, json};

use super::{Entry, Names, Table, proto};

/// The members of `NameInfo`, in the order of their field numbers.
const MEMBERS: [(&str, bool); 5] = [
    ("ips", true),
    ("registry", false),
    ("shortname", false),
    ("namespace", false),
    ("altHosts", true),
];

impl Table {
    /// All of the table. Takes a while with a large one.
    pub fn to_json(&self) -> Value {
        let mut hosts = Map::new();
        for field in proto::fields(&self.raw, 0..self.raw.len()) {
            // Everything could be read when the table was built.
            if let Ok((1, place)) = field {
                let (host, info) = self.sent(place);
                hosts.insert(host, info);
            }
        }
        for number in 0..self.hosts() {
            let entry = &self.entries[number];
            if entry.names > Names::Nothing {
                self.add_forms(number as u32, entry, &mut hosts);
            }
        }
        if hosts.is_empty() {
            return json!({});
        }
        json!({ "table": hosts })
    }

    /// One host as it came.
    fn sent(&self, place: std::ops::Range<usize>) -> (String, Value) {
        let text = |place| String::from_utf8_lossy(&self.raw[place]).into_owned();
        let (mut host, mut info) = (String::new(), 0..0);
        for (number, place) in proto::fields(&self.raw, place).flatten() {
            match number {
                1 => host = text(place),
                2 => info = place,
                _ => {}
            }
        }
        let mut values: [Vec<String>; MEMBERS.len()] = Default::default();
        for (number, place) in proto::fields(&self.raw, info).flatten() {
            let index = usize::try_from(number).unwrap_or_default().wrapping_sub(1);
            if let Some(values) = values.get_mut(index) {
                values.push(text(place));
            }
        }
        let mut members = Map::new();
        for ((name, is_list), mut values) in MEMBERS.into_iter().zip(values) {
            let last = values.pop().filter(|last| is_list || !last.is_empty());
            let Some(last) = last else { continue };
            values.push(last);
            let value = match is_list {
                true => Value::from(values),
                false => Value::from(values.pop()),
            };
            members.insert(name.to_owned(), value);
        }
        (host, members.into())
    }

    fn add_forms(&self, number: u32, entry: &Entry, hosts: &mut Map<String, Value>) {
        for form in self.forms(number, entry) {
            let absolute = format!("{form}.");
            if hosts.contains_key(&absolute) {
                continue;
            }
            let Some(found) = self.addresses(form.as_bytes()) else {
                continue;
            };
            let v4 = found.v4.iter().map(ToString::to_string);
            let ips: Vec<_> = v4.chain(found.v6.iter().map(ToString::to_string)).collect();
            hosts.insert(absolute, json!({ "ips": ips, "registry": "Kubernetes" }));
        }
    }

    /// The names an entry is known by, lower case, without a dot at their end.
    fn forms(&self, number: u32, entry: &Entry) -> Vec<String> {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).to_ascii_lowercase();
        let mut forms = vec![text(super::key(entry.host(&self.raw)))];
        if entry.names >= Names::Aliased {
            let short = text(entry.short(&self.raw));
            let alias = format!("{short}.{}", text(entry.namespace(&self.raw)));
            forms.push(format!("{alias}{}", self.scope.first_label));
            forms.push(alias);
            if entry.names == Names::Own {
                forms.push(short);
            }
        }
        let first = self.alts.partition_point(|alt| alt.entry < number);
        let alts = self.alts[first..].iter();
        let own = alts.take_while(|alt| alt.entry == number);
        forms.extend(own.map(|alt| text(alt.host.of(&self.raw))));
        forms
    }
}
