//! The `config` command: what the agent would run with, and who says so.
//!
//! Takes the flags of `proxy`, so that it can stand in its place on a command line.
//!
//! Does not start anything, and does not look at a running agent.

use clap::{Args, CommandFactory};

use super::{Cli, ProxyFlags};

#[derive(Args, Clone, Debug)]
pub struct ConfigFlags {
    #[command(flatten)]
    pub proxy: ProxyFlags,
    /// Output form: yaml or json.
    #[arg(short, long, value_parser = ["yaml", "json"], default_value = "yaml")]
    pub output: String,
}

/// A flag that has an effect on the configuration.
#[derive(Clone, Debug)]
pub struct Flag {
    pub name: &'static str,
    pub value: String,
    /// Whether it says what it says when nobody uses it.
    pub is_default: bool,
}

/// The flags with an effect, as they are.
pub fn flags(flags: &ProxyFlags) -> Vec<Flag> {
    let levels = &flags.proxy_component_log_level;
    let values = [
        ("kind", flags.kind.to_string()),
        ("concurrency", flags.concurrency.to_string()),
        ("domain", flags.domain.clone()),
        ("meshConfig", flags.mesh_config.display().to_string()),
        ("outlierLogPath", flags.outlier_log_path.clone()),
        ("proxyComponentLogLevel", levels.clone()),
        ("proxyLogLevel", flags.proxy_log_level.clone()),
        ("serviceCluster", flags.service_cluster.clone()),
        ("templateFile", flags.template_file.clone()),
    ];
    let cli = Cli::command();
    let default = |name: &str| {
        let proxy = cli.find_subcommand("proxy")?;
        let mut known = proxy.get_arguments();
        let flag = known.find(|flag| flag.get_long() == Some(name) || flag.get_id() == name)?;
        flag.get_default_values().first()?.to_str()
    };
    let flags = values.into_iter().map(|(name, value)| Flag {
        name: if name == "kind" { "type" } else { name },
        is_default: default(name) == Some(value.as_str()),
        value,
    });
    flags.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{self, Command};

    #[test]
    fn flags_that_were_used_differ_from_their_defaults() {
        let line = "pilot-agent config router --concurrency 2 --proxyLogLevel=warning -o json";
        let typed = cli::parse(line.split(' ').map(str::to_owned)).expect("flags");
        let Some(Command::Config(typed)) = typed.cli.command else {
            panic!("no config");
        };
        assert_eq!(typed.output, "json");
        let used = flags(&typed.proxy)
            .into_iter()
            .filter(|flag| !flag.is_default);
        let used: Vec<_> = used.map(|flag| (flag.name, flag.value)).collect();
        let expected = [
            ("type", "router".to_owned()),
            ("concurrency", "2".to_owned()),
        ];
        assert_eq!(used, expected);
    }
}
