//! Tests how settings of traffic capture are validated.

use clap::FromArgMatches;
use proptest::prelude::*;

use super::*;
use crate::capture::iptables::restore;
use crate::capture::rules::{Family, Rules};

pub(in crate::capture) fn settings(change: impl FnOnce(&mut Settings)) -> Settings {
    let command = Settings::augment_args(clap::Command::new("istio-iptables"));
    let matches = command.get_matches_from([""; 0]);
    let mut settings = Settings::from_arg_matches(&matches).expect("settings");
    change(&mut settings);
    settings
}

pub(in crate::capture) fn checked(change: impl FnOnce(&mut Settings)) -> (Config, Vec<Problem>) {
    Config::check(&settings(change), &Host::default()).expect("a configuration")
}

fn problems(change: impl FnOnce(&mut Settings)) -> Vec<String> {
    let error = Config::check(&settings(change), &Host::default()).expect_err("problems");
    error.0.iter().map(Problem::brief).collect()
}

#[test]
fn lists_may_have_blanks_and_trailing_commas() {
    let (config, warnings) = checked(|s| {
        s.istio_inbound_ports = " 80, 443,,".to_owned();
        s.istio_service_cidr = "10.0.0.1/8 ,2001:db8::/32,".to_owned();
        s.istio_exclude_interfaces = "eth0, net+".to_owned();
        s.proxy_uid = "1337,envoy".to_owned();
    });
    assert_eq!(config.inbound, Selection::Only(vec![80..=80, 443..=443]));
    let ranges = config.include_ranges.expect("ranges");
    let ranges: Vec<_> = ranges.iter().map(ToString::to_string).collect();
    assert_eq!(ranges, ["10.0.0.1/8", "2001:db8::/32"]);
    assert_eq!(config.exclude_interfaces, ["eth0", "net+"]);
    let users = [Id::from(1337), Id::Name("envoy".to_owned())];
    assert_eq!((config.uids.as_slice(), config.gids.as_slice()), (&users[..], &users[..]));
    assert!(warnings.is_empty());
}

#[test]
fn ports_and_users_may_be_ranges() {
    let (config, _) = checked(|s| {
        s.istio_outbound_ports = "8000:9000, 7000-7001,0:65535,80:80".to_owned();
        s.proxy_uid = "1000-2000,a-b".to_owned();
    });
    assert_eq!(config.include_outbound_ports, [8000..=9000, 7000..=7001, 1..=65535, 80..=80]);
    let users = [Id::Numbers(1000..=2000), Id::Name("a-b".to_owned())];
    assert_eq!(config.uids, users);
}

#[test]
fn a_port_names_the_item_and_what_is_expected() {
    for item in [
        "65536", "-1", "+1", "http", "*", "9:8", "0:0", "1:2:3", "8000:", "-9000", "1 2", "0x50",
        "80\n443",
    ] {
        let found = problems(|s| s.istio_inbound_ports = format!("80,{item}"));
        let expected = format!(
            "an item of --istio-inbound-ports is {item:?}, expected a port from 0 to 65535 or a range such as 8000:9000"
        );
        assert_eq!(found, [expected]);
    }
    for port in ["0", "", "65536", "x"] {
        let found = problems(|s| s.envoy_port = port.to_owned());
        assert_eq!(found, [format!("--envoy-port is {port:?}, expected a number from 1 to 65535")]);
    }
}

/// The rows have a setting, its text, and the refused item, if any.
#[test]
fn texts_of_settings_are_taken_or_their_wrong_item_is_named() {
    type Setting = (&'static str, fn(&mut Settings) -> &mut String);
    let ports: Setting = ("--istio-inbound-ports", |s| &mut s.istio_inbound_ports);
    let ranges: Setting = ("--istio-service-cidr", |s| &mut s.istio_service_cidr);
    let interfaces: Setting = ("--istio-exclude-interfaces", |s| &mut s.istio_exclude_interfaces);
    let users: Setting = ("--proxy-uid", |s| &mut s.proxy_uid);
    let groups: Setting = ("--istio-outbound-owner-groups", |s| &mut s.istio_outbound_owner_groups);
    for ((subject, setting), text, refused) in [
        (ports, "", None),
        (ports, "*", None),
        (ports, " 80 , 443,", None),
        (ports, ",,", None),
        (ports, "80,65536", Some("65536")),
        (ports, "80,http", Some("http")),
        (ports, "80,*", Some("*")),
        (ports, "9000:8000", Some("9000:8000")),
        (ranges, "", None),
        (ranges, "10.1.2.3/8", None),
        (ranges, "10.0.0.0/8, 2001:db8::/32,", None),
        (ranges, "10.0.0.0/8,10.0.0.1", Some("10.0.0.1")),
        (ranges, "10.0.0.0/33", Some("10.0.0.0/33")),
        (ranges, "::ffff:10.0.0.0/129", Some("::ffff:10.0.0.0/129")),
        (ranges, "10.0.0.0/8,*", Some("*")),
        (interfaces, "", None),
        (interfaces, "no-such-one,eth+", None),
        (interfaces, "a name of two", Some("a name of two")),
        (users, "istio-proxy,1337,5-7", None),
        (users, "4294967296", Some("4294967296")),
        (users, "7-5", Some("7-5")),
        (users, "1337,-j", Some("-j")),
        (groups, "", None),
        (groups, "java, 202", None),
        (groups, "java,*", Some("*")),
    ] {
        let settings = settings(|s| text.clone_into(setting(s)));
        let result = Config::check(&settings, &Host::default());
        let said = result.map(|_| ()).map_err(|error| error.to_string());
        let named = refused.map(|item| format!("an item of {subject} is {item:?}, expected "));
        match (said, named) {
            (Ok(()), None) => {}
            (Err(said), Some(named)) => assert!(said.contains(&named), "{said}"),
            (said, _) => panic!("{subject}={text:?}: {said:?}"),
        }
    }
}

#[test]
fn ten_thousand_ranges_become_ten_thousand_rules() {
    let range = |n: u16| format!("10.{}.{}.0/24,2001:db8:{n:x}::/48,", n / 256, n % 256);
    let list: String = (0..5000).map(range).collect();
    let settings = settings(|s| s.istio_service_exclude_cidr = list);
    let host = Host { has_v6: true, ..Host::default() };
    let (config, _) = Config::check(&settings, &host).expect("a configuration");
    let rules = Rules::new(&config);
    for (family, excluded) in [(Family::V4, "-d 10."), (Family::V6, "-d 2001:db8:")] {
        let text = restore(&rules, family);
        let count = text.lines().filter(|line| line.contains(excluded)).count();
        assert_eq!(count, 5000);
    }
}

#[test]
fn all_problems_are_reported_at_once() {
    let found = problems(|s| {
        s.istio_service_cidr = "10.0.0.1,*".to_owned();
        s.istio_service_exclude_cidr = "*".to_owned();
        s.istio_exclude_interfaces = "eth0 -j ACCEPT,-A,longer-than-15-bytes".to_owned();
        s.proxy_uid = "4294967295,a b,5-1,root!".to_owned();
        s.proxy_gid = "1".to_owned();
        s.istio_outbound_owner_groups = "1,!".to_owned();
        s.istio_outbound_ipv4_loopback_cidr = "127.0.0.1/7".to_owned();
        s.istio_inbound_tproxy_mark = "0x100000000".to_owned();
        s.force_iptables_binary = "NFT".to_owned();
    });
    assert_eq!(found.len(), 14, "{found:#?}");
}

#[test]
fn marks_may_be_hexadecimal_as_for_iptables() {
    for (mark, expected) in
        [("1337", 1337), ("0x539", 1337), ("0X5a", 90), ("0xFFFFFFFF", u32::MAX)]
    {
        let (config, _) = checked(|s| s.istio_inbound_tproxy_mark = mark.to_owned());
        assert_eq!(config.tproxy_mark, expected, "{mark}");
    }
    for mark in ["0x", "0x0", "0xg", "0x-1", "0x100000000", "x539", "539h"] {
        let found = problems(|s| s.istio_inbound_tproxy_mark = mark.to_owned());
        assert_eq!(found.len(), 1, "{mark}");
    }
}

#[test]
fn settings_without_effect_are_not_validated() {
    checked(|s| s.istio_local_exclude_ports = "x".to_owned());
    checked(|s| {
        s.istio_outbound_owner_groups = "1".to_owned();
        s.istio_outbound_owner_groups_exclude = "!".to_owned();
    });
}

#[test]
fn other_modes_redirect_and_dns_without_servers_is_off_with_a_warning() {
    let (config, warnings) = checked(|s| {
        s.istio_inbound_interception_mode = "tproxy".to_owned();
        s.redirect_dns = true;
    });
    assert_eq!((config.mode, config.dns), (Mode::Redirect, Vec::new()));
    assert_eq!(warnings.len(), 2, "{warnings:?}");
}

#[test]
fn the_proxys_user_is_the_one_named_then_envoys_then_1337() {
    for (given, envoy, expected) in [("5", Some(6), 5), ("", Some(6), 6), ("", None, 1337)] {
        let host = Host { envoy_uid: envoy, ..Host::default() };
        let settings = settings(|s| s.proxy_uid = given.to_owned());
        let (config, _) = Config::check(&settings, &host).expect("a configuration");
        assert_eq!(config.uids, [Id::from(expected)]);
        assert_eq!(config.gids, [Id::from(expected)]);
    }
}

proptest! {
    /// Checks that no setting can add a line or an option to the rules.
    #[test]
    fn a_setting_of_any_text_is_refused_or_stays_one_word(
        text in "[ -~\\n\\t]{0,12}|[a-z0-9*,./:!\\-\\x00-\\x20\u{e9}]{0,20}|-j|[0-9]{1,5}",
        which in 0..12_usize,
    ) {
        let settings = settings(|s| {
            s.istio_service_cidr = "10.0.0.0/8".to_owned();
            s.istio_inbound_ports = "*".to_owned();
            let setting = [
                &mut s.envoy_port, &mut s.proxy_uid, &mut s.proxy_gid, &mut s.istio_inbound_interception_mode,
                &mut s.istio_inbound_ports, &mut s.istio_local_exclude_ports, &mut s.istio_exclude_interfaces,
                &mut s.istio_service_cidr, &mut s.kube_virt_interfaces, &mut s.istio_inbound_tproxy_mark,
                &mut s.istio_outbound_ipv4_loopback_cidr, &mut s.istio_outbound_owner_groups,
            ];
            *setting.into_iter().nth(which).expect("a setting") = text.clone();
        });
        if let Ok((config, _)) = Config::check(&settings, &Host::default()) {
            let rules = Rules::new(&config);
            let lines = restore(&rules, Family::V4);
            let added = lines.lines().filter(|line| line.starts_with("-A ") || line.starts_with("-I "));
            prop_assert_eq!(added.clone().count(), rules.for_family(Family::V4).count(), "{}", &lines);
            for line in added {
                prop_assert_eq!(line.split(' ').filter(|word| *word == "-j").count(), 1, "{}", line);
            }
        }
    }
}
