//! Tests that the packages have the manual page of every command.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use clap::CommandFactory;

use super::Cli;

/// `UPDATE_GOLDEN=1` writes the pages instead.
#[test]
#[expect(clippy::disallowed_methods, reason = "how a developer asks for an update")]
fn the_packages_have_the_manual_page_of_every_command() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/package/man");
    let mut command = Cli::command();
    command.build();
    let commands = command.get_subcommands().filter(|it| it.get_name() != "help");
    let pages = std::iter::once(&command).chain(commands).map(|command| {
        let mut page = Vec::new();
        clap_mangen::Man::new(command.clone()).render(&mut page).expect("written");
        let name = command.get_display_name().unwrap_or(command.get_name());
        (format!("{name}.1"), String::from_utf8(page).expect("text"))
    });
    let expected: BTreeMap<_, _> = pages.collect();
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        for (name, page) in &expected {
            fs::write(directory.join(name), page).expect("written");
        }
    }
    let files = fs::read_dir(&directory).expect("the pages").map(|file| file.expect("a file"));
    let found = files.map(|file| {
        let page = fs::read_to_string(file.path()).expect("a page");
        (file.file_name().into_string().expect("text"), page)
    });
    let found: BTreeMap<_, _> = found.collect();
    assert!(found.keys().eq(expected.keys()), "{:?}", found.keys());
    for (name, page) in &expected {
        assert!(found[name] == *page, "{name} is out of date: run this test with UPDATE_GOLDEN=1");
    }
}
