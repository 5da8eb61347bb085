//! Tests how much memory a large page takes, without that of the code, in a process that does nothing else.

use std::fs;
use std::process::Command;

use http_body_util::BodyExt;

use crate::scrape::{request_for_protobuf, scrape, server};

const PORTS: &str = "SCRAPED_PORTS";
const SMALL: &str = "SMALL_PORT";
/// The most that memory may grow, in KiB.
const MOST: u64 = 2048;

#[test]
fn a_page_of_100_000_lines_costs_less_than_2_mb() {
    let small = server::page(server::TEXT, server::large("small", 10));
    let large = server::page(server::TEXT, server::large("large", 100_000));
    let other = server::page(server::TEXT, server::large("other", 100_000));
    let half = server::page(server::TEXT, server::large("half", 50_000));
    let rest = server::page(server::TEXT, server::large("rest", 50_000));
    let copied = server::page(server::PROTOBUF, server::large_in_protobuf("protobuf", 100_000));
    let one_in_protobuf = server::page(server::PROTOBUF, server::large_in_protobuf("one", 1));
    let histograms = server::page(server::TEXT, server::histograms(12_000));
    for ports in [
        [small, large, 0],
        [large, other, 0],
        [small, half, rest],
        [copied, small, 0],
        [copied, large, 0],
        [one_in_protobuf, histograms, 0],
    ] {
        // The kernel counts pages per CPU and adds them up in batches, so each reading may be wrong by hundreds of
        // KiB. A page that takes too much memory does so in each of the three processes.
        assert!((0..3).any(|_| scrapes_within_limit(ports, small)), "{ports:?}");
    }
}

fn scrapes_within_limit(ports: [u16; 3], small: u16) -> bool {
    let child = Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", "scrape::memory::scrapes_alone", "--ignored", "--nocapture"])
        .env(PORTS, ports.map(|port| port.to_string()).join(" "))
        .env(SMALL, small.to_string())
        .output()
        .expect("started");
    let said = String::from_utf8_lossy(&child.stdout);
    println!("{said}");
    said.contains("1 passed")
}

#[test]
#[ignore = "the other test runs it, in a process of its own"]
fn scrapes_alone() {
    let ports = std::env::var(PORTS).expect("ports");
    let ports: Vec<u16> = ports.split(' ').map(|port| port.parse().unwrap()).collect();
    let small: u16 = std::env::var(SMALL).unwrap().parse().unwrap();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let read = |envoy, targets: &[u16]| {
        runtime.block_on(async {
            let mut body = scrape(envoy, targets).page(request_for_protobuf()).await.into_body();
            let mut length = 0;
            while let Some(frame) = body.frame().await {
                length += frame.expect("a page").into_data().expect("data").len();
            }
            length
        })
    };
    // These scrapes fill the caches, and load most of the code into memory.
    read(small, &[small]);
    read(small, &[small, small]);
    // The test program is large, and the kernel loads parts of it when they are first used, so memory of mapped
    // files does not count.
    let without_code = |name| kib(name) - kib("RssFile");
    let before = without_code("VmRSS");
    // This resets the peak, `VmHWM`.
    fs::write("/proc/self/clear_refs", "5").expect("written");
    let targets: Vec<_> = ports[1..].iter().copied().filter(|port| *port != 0).collect();
    let length = read(ports[0], &targets);
    let growth = without_code("VmHWM").saturating_sub(before);
    println!("{length} bytes: {growth} KiB");
    assert!(length > 7_500_000 && growth < MOST, "{growth} KiB");
}

fn kib(name: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").expect("status");
    let line = status.lines().find(|line| line.starts_with(name));
    let number = line.expect("a line").split_whitespace().nth(1);
    number.expect("a number").parse().expect("a number")
}
