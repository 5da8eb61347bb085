//! `local-istiod`: the control plane for demos and development as a program.
//!
//! The program writes the root certificate and the tokens for agents into a folder, serves certificates
//! and the resources of another folder, and prints one line per event. SIGTERM and SIGINT end it.
#![allow(
    clippy::arithmetic_side_effects,
    clippy::disallowed_methods,
    reason = "a development tool"
)]

use std::error::Error;
use std::fs;
use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use local_istiod::{
    Event, Events, Keys, LocalIstiod, Options, Snapshot, SnapshotError, follow, write_private,
};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, watch};

type BoxError = Box<dyn Error>;

/// A small control plane: certificates and Envoy resources without Kubernetes.
#[derive(Debug, Parser)]
#[command(name = "local-istiod")]
struct Arguments {
    /// Address and port to listen on; port 0 means any port, or with --state the port of the last start.
    #[arg(long, default_value = "127.0.0.1:0")]
    listen: SocketAddr,
    /// Folder of Envoy resources, YAML or JSON. Files directly in it or in `common` are for all nodes,
    /// files in a folder named after a node's cluster or pod are for that node.
    #[arg(long)]
    resources: Option<PathBuf>,
    /// Folder for root-cert.pem and <namespace>.<service account>/istio-token.
    #[arg(long)]
    out: Option<PathBuf>,
    /// Account to mint a token for; may be repeated.
    #[arg(long = "identity", value_name = "NAMESPACE/ACCOUNT", value_parser = identity)]
    identities: Vec<(String, String)>,
    /// Maximum lifetime of certificates; longer requested lifetimes are shortened to it.
    #[arg(long, default_value = "24h", value_parser = duration)]
    max_cert_ttl: Duration,
    #[arg(long, default_value = "24h", value_parser = duration)]
    token_ttl: Duration,
    #[arg(long, default_value = "cluster.local")]
    trust_domain: String,
    /// Another name or address of the serving certificate; may be repeated.
    #[arg(long = "name")]
    names: Vec<String>,
    /// Folder that stores root, token key and port for the next start.
    #[arg(long)]
    state: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("local-istiod: {}", sentence(&*error));
            ExitCode::FAILURE
        }
    }
}

/// Returns the error and its causes, without repetition.
fn sentence(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        let cause = error.to_string();
        if !text.ends_with(&cause) {
            text = format!("{text}: {cause}");
        }
        source = error.source();
    }
    text
}

#[tokio::main(flavor = "current_thread")]
async fn run(arguments: Arguments) -> Result<(), BoxError> {
    let (mut terminate, mut interrupt) =
        (signal(SignalKind::terminate())?, signal(SignalKind::interrupt())?);
    let (sender, mut events) = mpsc::unbounded_channel();
    let mut options = options(&arguments, Events::to(sender))?;
    let (snapshots, polling) = snapshots(&arguments, &options.events).await?;
    options.snapshots = Some(snapshots);
    let istiod = LocalIstiod::start(options).await?;
    save_port(&arguments, &istiod)?;
    write_credentials(&arguments, &istiod)?;
    print(&format!("local-istiod listening on {}", istiod.address))?;
    let result = tokio::select! {
        () = polling => Ok(()),
        result = renew_tokens(&arguments, &istiod) => result,
        result = print_all(&mut events) => result,
        _ = terminate.recv() => Ok(()),
        _ = interrupt.recv() => Ok(()),
    };
    istiod.stop().await;
    result
}

type Snapshots = watch::Receiver<Arc<Snapshot>>;

/// Returns the resources, and a future that keeps them up to date. Without a folder there are no
/// resources.
async fn snapshots(
    arguments: &Arguments,
    events: &Events,
) -> Result<(Snapshots, Pin<Box<dyn Future<Output = ()>>>), SnapshotError> {
    let Some(folder) = &arguments.resources else {
        let none = watch::channel(Arc::default()).1;
        return Ok((none, Box::pin(std::future::pending())));
    };
    let (snapshots, polling) = follow(folder.clone(), events.clone()).await?;
    Ok((snapshots, Box::pin(polling)))
}

fn options(arguments: &Arguments, events: Events) -> Result<Options, BoxError> {
    let mut options = Options {
        listen: arguments.listen,
        trust_domain: arguments.trust_domain.clone(),
        extra_names: arguments.names.clone(),
        max_cert_ttl: arguments.max_cert_ttl,
        events,
        ..Options::default()
    };
    if let Some(state) = &arguments.state {
        options.keys = Some(Keys::load_or_generate(state, &arguments.trust_domain)?);
        if options.listen.port() == 0 && port_file(state).try_exists()? {
            options.listen.set_port(fs::read_to_string(port_file(state))?.trim().parse()?);
        }
    }
    Ok(options)
}

fn save_port(arguments: &Arguments, istiod: &LocalIstiod) -> Result<(), BoxError> {
    if let Some(state) = &arguments.state {
        fs::write(port_file(state), istiod.address.port().to_string())?;
    }
    Ok(())
}

fn port_file(state: &Path) -> PathBuf {
    state.join("port")
}

/// Writes the root certificate and new tokens.
fn write_credentials(arguments: &Arguments, istiod: &LocalIstiod) -> Result<(), BoxError> {
    let Some(out) = &arguments.out else {
        return Ok(());
    };
    fs::create_dir_all(out)?;
    fs::write(out.join("root-cert.pem"), istiod.root_pem())?;
    for (namespace, account) in &arguments.identities {
        let folder = out.join(format!("{namespace}.{account}"));
        fs::create_dir_all(&folder)?;
        let token = istiod.mint_token(namespace, account, arguments.token_ttl)?;
        write_private(&folder.join("istio-token"), token.as_bytes())?;
    }
    Ok(())
}

/// Replaces the tokens at half of their lifetime, forever.
async fn renew_tokens(arguments: &Arguments, istiod: &LocalIstiod) -> Result<(), BoxError> {
    loop {
        tokio::time::sleep(arguments.token_ttl / 2).await;
        write_credentials(arguments, istiod)?;
    }
}

async fn print_all(events: &mut mpsc::UnboundedReceiver<Event>) -> Result<(), BoxError> {
    while let Some(event) = events.recv().await {
        print(&event.to_string())?;
    }
    Ok(())
}

/// Prints a line. A closed standard output is an error, not a panic.
fn print(line: &str) -> Result<(), BoxError> {
    Ok(writeln!(std::io::stdout(), "{line}")?)
}

fn identity(text: &str) -> Result<(String, String), String> {
    match text.split_once('/') {
        Some((namespace, account)) if !namespace.is_empty() && !account.is_empty() => {
            Ok((namespace.to_owned(), account.to_owned()))
        }
        _ => Err("expected <namespace>/<service account>".to_owned()),
    }
}

/// Parses a positive integer with one of the units s, m, h and d.
fn duration(text: &str) -> Result<Duration, String> {
    let parsed = || {
        let unit = text.chars().last()?;
        let seconds = match unit {
            's' => 1,
            'm' => 60,
            'h' => 3600,
            'd' => 24 * 3600,
            _ => return None,
        };
        let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
        number.checked_mul(seconds).filter(|seconds| *seconds > 0)
    };
    parsed()
        .map(Duration::from_secs)
        .ok_or_else(|| "expected a number and s, m, h or d, as in 90s".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_durations_with_one_unit() {
        assert_eq!(duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("24h"), Ok(Duration::from_secs(86_400)));
        for wrong in ["", "5", "0s", "h", "1.5h", "-1s", "99999999999999999999d", "5\u{e9}"] {
            assert!(duration(wrong).is_err(), "{wrong:?}");
        }
    }
}
