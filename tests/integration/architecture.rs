//! Compares the table of modules in `ARCHITECTURE.md` with the paths in `src`: a module uses exactly the modules
//! that its row lists, and the modules form no cycle.
//!
//! Base modules are listed below the row [`BASE`]. Every module may use them; their own rows list the modules that
//! they use. A module in one of the [`ROOMS`] has a row of its own, such as `net::dial`. Test code is exempt.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

type Uses = BTreeMap<String, BTreeSet<String>>;

/// The row above the base modules.
const BASE: &str = "*base modules*";
/// Folders of base modules, which are no modules of their own.
const ROOMS: [&str; 4] = ["files", "net", "runtime", "trust"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Returns the rows of the table, and the base modules.
fn table() -> (Uses, BTreeSet<String>) {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let (_, rest) = text.split_once("<!-- modules: begin -->").unwrap();
    let (table, _) = rest.split_once("<!-- modules: end -->").unwrap();
    let (mut rows, mut base) = (Uses::new(), None);
    for line in table.lines().filter(|line| line.starts_with('|')).skip(2) {
        let cells: Vec<_> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [module, _, uses] = cells.as_slice() else {
            panic!("three cells expected: {line}");
        };
        if *module == BASE {
            base = Some(BTreeSet::new());
            continue;
        }
        let name = module.trim_matches('`').to_owned();
        base.as_mut().map(|base| base.insert(name.clone()));
        let uses = uses.split([',', ' ']).filter(|name| !name.is_empty());
        let uses = uses.map(|name| name.trim_matches('`').to_owned());
        assert!(rows.insert(name, uses.collect()).is_none(), "{line}");
    }
    (rows, base.expect("base modules"))
}

/// Returns, for each module of `src`, the modules that its `crate::` paths name.
fn code() -> Uses {
    let (mut uses, mut folders) = (Uses::new(), vec![root().join("src")]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if is_for_tests(&path) {
                continue;
            }
            let is_room = path.file_name().is_some_and(|name| name == "mod.rs")
                && ROOMS.iter().any(|room| path.parent().unwrap().ends_with(format!("src/{room}")));
            if path.is_dir() {
                folders.push(path);
            } else if is_room {
                // It only lists the modules.
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let module = module_of(&path);
                let text = without_tests(&fs::read_to_string(&path).unwrap());
                let used = paths(&text.replace("istio_agent::", "crate::"));
                let used = used.into_iter().filter(|used| *used != module);
                uses.entry(module.clone()).or_default().extend(used);
            }
        }
    }
    uses.remove("lib");
    uses
}

fn module_of(path: &Path) -> String {
    let path: PathBuf = path.strip_prefix(root().join("src")).unwrap().into();
    let parts = path.iter().map(|part| part.to_str().unwrap().trim_end_matches(".rs"));
    let parts: Vec<_> = parts.take(2).collect();
    if ROOMS.contains(&parts[0]) { parts.join("::") } else { parts[0].to_owned() }
}

fn is_for_tests(path: &Path) -> bool {
    let name = path.file_stem().unwrap().to_str().unwrap();
    name == "tests" || name.ends_with("_tests") || name.starts_with("fake")
}

/// Returns the text without comments and without items for tests.
fn without_tests(text: &str) -> String {
    let (mut kept, mut lines) = (String::new(), text.lines());
    while let Some(line) = lines.next() {
        let indent = line.len() - line.trim_start().len();
        if line.trim() == "#[cfg(test)]" {
            let end = lines.find(|line| line.ends_with(['{', ';', ',']));
            if end.is_some_and(|line| line.ends_with('{')) {
                let closes =
                    |line: &&str| line[..].starts_with(&format!("{}}}", " ".repeat(indent)));
                lines.find(closes).expect("the end of an item");
            }
        } else if !line.trim_start().starts_with("//") {
            kept.push_str(line);
            kept.push('\n');
        }
    }
    kept
}

/// Returns the module in each path after `crate::`, also in the paths of a `use` group.
fn paths(text: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for rest in text.split("crate::").skip(1) {
        add_modules(rest, "", &mut names);
    }
    names
}

/// Adds the modules at the beginning of `text`: one name, or a group of names in braces, behind `room`.
fn add_modules(text: &str, room: &str, names: &mut BTreeSet<String>) {
    let Some(group) = text.strip_prefix('{') else {
        let end = text.find(|c: char| !c.is_alphanumeric() && c != '_');
        let (name, rest) = text.split_at(end.unwrap_or(text.len()));
        match rest.strip_prefix("::") {
            Some(inner) if ROOMS.contains(&name) => add_modules(inner, &format!("{name}::"), names),
            _ => _ = names.insert(format!("{room}{name}")),
        }
        return;
    };
    let (mut depth, mut starts) = (0, true);
    for (at, character) in group.char_indices() {
        match character {
            '}' if depth == 0 => break,
            ',' if depth == 0 => starts = true,
            c if starts && !c.is_whitespace() => {
                add_modules(&group[at..], room, names);
                starts = false;
            }
            _ => {}
        }
        match character {
            '{' => depth += 1,
            '}' => depth -= 1,
            _ => {}
        }
    }
}

#[test]
fn module_dependencies_equal_the_table() {
    let ((rows, base), code) = (table(), code());
    for (module, uses) in &code {
        let mut uses = uses.clone();
        if !base.contains(module) {
            uses.retain(|used| !base.contains(used));
        }
        let row = rows.get(module);
        let row = row.unwrap_or_else(|| panic!("{module} has no row in ARCHITECTURE.md"));
        let missing: Vec<_> = uses.difference(row).collect();
        let needless: Vec<_> = row.difference(&uses).collect();
        assert!(
            missing.is_empty() && needless.is_empty(),
            "{module}, of what it uses, ARCHITECTURE.md lacks {missing:?}; not used: {needless:?}"
        );
    }
    let known: BTreeSet<_> = code.keys().collect();
    let gone: Vec<_> = rows.keys().filter(|row| !known.contains(row)).collect();
    assert!(gone.is_empty(), "rows without a module: {gone:?}");
}

#[test]
fn modules_form_no_cycle() {
    let mut code = code();
    loop {
        let free: Vec<_> = code.keys().filter(|module| code[*module].is_empty()).cloned().collect();
        if free.is_empty() {
            break;
        }
        for module in free {
            code.remove(&module);
            code.values_mut().for_each(|uses| {
                uses.remove(&module);
            });
        }
    }
    assert!(code.is_empty(), "a cycle is among {code:?}");
}

#[test]
fn module_paths_are_found_in_use_groups_and_outside_test_code() {
    let text = "use crate::{a::{b, c}, d};\nlet x = crate::e::f();\n// crate::g\n\
                #[cfg(test)]\nuse crate::h;\nmod x {\n    #[cfg(test)]\n    #[allow(y)]\n    fn z() {\n        \
                crate::i();\n    }\n    use crate::j;\n}\n#[cfg(test)]\nmod tests {\n    use crate::k;\n}\n\
                use crate::net::{dial::{self, Dialer}, port};\nuse crate::files::volume::Volume;\n";
    let found: Vec<_> = paths(&without_tests(text)).into_iter().collect();
    let expected = ["a", "d", "e", "files::volume", "j", "net::dial", "net::port"];
    assert_eq!(found, expected);
}
