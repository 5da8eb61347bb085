//! Answers the requests of an Envoy from what is kept, on a thread of its own.
//!
//! A subscription gets the kept resources it names; ACKs and NACKs get no answer. Envoy starts only
//! when it has endpoints for each cluster and routes for each listener, so where these are kept in
//! general but not those of one name, it gets empty ones.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use prost::Message;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};

use super::file::{BLOCK, Index, unix_time};
use super::subscription::{Fields, Subscription};
use super::writer::open;
use super::{CLUSTER, Config, DIRECTORY, ENDPOINTS, EnvoyCache, LastKnownGood, ROUTES, TYPES};
use crate::clock::later;
use crate::directory::Directory;
use crate::istiod::{Closed, Istiod};
use crate::xds::Protocol;
use crate::xds::end::End;
use crate::xds::stream::LISTENER;

/// Blocks that wait for Envoy.
const BLOCKS: usize = 4;

/// How long an Envoy that has listeners may go on asking for what they refer to before it is handed
/// over to istiod.
const SETTLING: Duration = Duration::from_millis(500);

/// How long an Envoy may take to answer the kept listeners before it is handed over all the same.
const MAX_START: Duration = Duration::from_secs(10);

/// Answers the requests of one stream.
pub(in crate::xds) struct Replay {
    envoy: EnvoyCache,
    answers: mpsc::Receiver<io::Result<Bytes>>,
    began: Instant,
    istiod: Istiod,
    /// Has istiod dialed from the beginning; None once there is a connection.
    connecting: Option<Connecting>,
}

type Connecting = Pin<Box<dyn Future<Output = Result<(), Closed>> + Send>>;

impl Replay {
    /// Answers requests, framed as they came, until the stream ends or istiod is there.
    pub(in crate::xds) fn start(
        envoy: EnvoyCache,
        protocol: Protocol,
        requests: mpsc::UnboundedReceiver<Bytes>,
        istiod: Istiod,
    ) -> Self {
        let (out, answers) = mpsc::channel(BLOCKS);
        let kept = envoy.kept.clone();
        tokio::task::spawn_blocking(move || {
            if let Err(error) = answer(&kept, protocol, requests, &out)
                && !out.is_closed()
            {
                kept.status.failures.inc();
                let _ = out.blocking_send(Err(error)); // The stream may have ended.
            }
        });
        Self {
            envoy,
            answers,
            began: Instant::now(),
            connecting: Some(connecting(istiod.clone())),
            istiod,
        }
    }

    /// Waits for the next bytes, or until Envoy is to have istiod's. `settling_since` is Envoy's last
    /// request after it has answered listeners. Cancel safe.
    pub(in crate::xds) async fn next(
        &mut self,
        settling_since: Option<Instant>,
    ) -> Result<Bytes, End> {
        let settled = settling_since.map(|since| later(since, SETTLING));
        let end = settled.unwrap_or_else(|| later(self.began, MAX_START));
        let connected = async {
            if let Some(connecting) = &mut self.connecting {
                connecting.await?;
            }
            self.connecting = None;
            sleep_until(end).await;
            connecting(self.istiod.clone()).await
        };
        tokio::select! {
            answer = self.answers.recv() => {
                let ended = || Err(io::Error::other("its thread has ended"));
                answer.unwrap_or_else(ended).map_err(|error| {
                    self.envoy.end_waiting();
                    End::unusable(&error)
                })
            }
            connected = connected => {
                connected.map_err(|Closed| End::stopped())?;
                // Without listeners it is served again if istiod does not answer in time.
                self.envoy.heard_of_istiod(true);
                Err(End::handed_over())
            }
        }
    }
}

fn connecting(istiod: Istiod) -> Connecting {
    Box::pin(async move { istiod.connection().await.map(drop) })
}

pub(super) fn answer(
    kept: &LastKnownGood,
    protocol: Protocol,
    mut requests: mpsc::UnboundedReceiver<Bytes>,
    out: &mpsc::Sender<io::Result<Bytes>>,
) -> io::Result<()> {
    let _reading = kept.status.reading.read();
    let mut types = None;
    while let Some(request) = requests.blocking_recv() {
        let Ok(request) = Subscription::read(protocol, &request) else {
            continue; // It has been decoded before.
        };
        let types = match &mut types {
            Some(types) => types,
            None => {
                let opened = open_all(&kept.config, protocol, &request)?;
                kept.status.served.inc();
                types.insert(opened)
            }
        };
        if let Some(kept) = types.get_mut(&*request.type_url) {
            kept.answer(protocol, &request, out)?;
        }
        if out.is_closed() {
            break;
        }
    }
    Ok(())
}

/// One kept type, and the stream's subscription to it.
struct Type {
    version: String,
    index: Index,
    /// The names of the last subscription in SotW.
    names: Option<Vec<Bytes>>,
    answers: u64,
}

/// Reads and checks all that is kept, for the node in the first request.
fn open_all(
    config: &Config,
    protocol: Protocol,
    first: &Subscription,
) -> io::Result<HashMap<&'static str, Type>> {
    let (mut types, mut age, mut summary) = (HashMap::new(), Duration::MAX, String::new());
    let directory = Directory::private(&config.directory, DIRECTORY, false)?;
    let identity = first.identity(protocol);
    for type_url in TYPES {
        let (file, header) = match open(&directory, type_url) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            found => found?,
        };
        if header.length == 0 {
            continue;
        }
        if identity.as_ref() != Some(&header.identity) {
            let problem = "it is of another node, another Envoy or the other protocol";
            return Err(io::Error::other(problem));
        }
        age = age.min(unix_time().saturating_sub(Duration::from_secs(header.accepted)));
        let index = Index::read(protocol, &header, file)?;
        let name = type_url.rsplit('.').next().unwrap_or_default();
        let _ = write!(summary, ", {} {name}", index.resources.len());
        let version = header.version;
        let (names, answers) = (None, 0);
        types.insert(
            type_url,
            Type {
                version,
                index,
                names,
                answers,
            },
        );
    }
    if ![CLUSTER, LISTENER].iter().all(|it| types.contains_key(it)) {
        return Err(io::Error::other("it has no clusters or no listeners"));
    }
    if age > config.max_age {
        let problem = format!("it is {age:?} old, expected at most {:?}", config.max_age);
        return Err(io::Error::other(problem));
    }
    tracing::warn!(
        target: "xdsproxy",
        "istiod has not answered for {:?}: Envoy is served the configuration it accepted {} s ago{summary}",
        config.after,
        age.as_secs()
    );
    Ok(types)
}

impl Type {
    /// Answers a request if it changes the subscription.
    fn answer(
        &mut self,
        protocol: Protocol,
        request: &Subscription,
        out: &mpsc::Sender<io::Result<Bytes>>,
    ) -> io::Result<()> {
        let is_first = self.names.is_none();
        let is_new = match protocol {
            Protocol::Sotw => self.names.as_ref() != Some(&request.names),
            Protocol::Delta => is_first || !request.names.is_empty(),
        };
        self.names = Some(request.names.clone());
        if !is_new {
            return Ok(());
        }
        let is_all =
            is_first && request.names.is_empty() || request.names.iter().any(|it| it == "*");
        let (mut places, mut resources) = (Vec::new(), Vec::new());
        let may_be_empty = [ENDPOINTS, ROUTES].contains(&&*request.type_url);
        for name in request.names.iter().filter(|_| !is_all) {
            match self.index.get(name) {
                Some(place) => places.push(place),
                None if may_be_empty => resources.push(empty(protocol, &request.type_url, name)),
                None => {}
            }
        }
        if is_all {
            places.extend(self.index.resources.values().cloned());
        } else if places.is_empty() && resources.is_empty() {
            return Ok(());
        }
        self.answers += 1;
        let rest = Fields {
            first: vec![self.version.clone().into()],
            second: resources,
            fourth: vec![request.type_url.clone().into()],
            fifth: vec![format!("kept-{}", self.answers).into()],
            ..Fields::default()
        };
        let rest = rest.encode_to_vec();
        let mut send = |bytes: &[u8]| {
            let sent = out.blocking_send(Ok(Bytes::copy_from_slice(bytes)));
            sent.map_err(|_| io::Error::other("the stream has ended"))
        };
        self.index.message(places, rest.len() as u64, &mut send)?;
        rest.chunks(BLOCK).try_for_each(send)
    }
}

/// A resource that has nothing but its name, the first field of those that Envoy cannot start without.
fn empty(protocol: Protocol, type_url: &str, name: &Bytes) -> Bytes {
    let named = Fields {
        first: vec![name.clone()],
        ..Fields::default()
    };
    let any = Fields {
        first: vec![type_url.to_owned().into()],
        second: vec![named.encode_to_vec().into()],
        ..Fields::default()
    };
    let any = Bytes::from(any.encode_to_vec());
    match protocol {
        Protocol::Sotw => any,
        Protocol::Delta => {
            let resource = Fields {
                second: vec![any],
                third: vec![name.clone()],
                ..Fields::default()
            };
            resource.encode_to_vec().into()
        }
    }
}
