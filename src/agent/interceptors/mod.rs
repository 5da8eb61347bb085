//! The interceptors of NDS, PCDS and ECDS, which consume responses in place of Envoy or rewrite them.

mod ecds;
mod nds;
mod pcds;
mod resource;

use ecds::Ecds;
use nds::Nds;
pub(super) use pcds::Pcds;

use crate::dns::Dns;
use crate::wasm::Wasm;
use crate::xds::interceptor::{Interceptor, Interceptors};

/// Builds the interceptors.
pub(super) fn new(dns: Option<Dns>, pcds: Option<Pcds>, wasm: Option<Wasm>) -> Interceptors {
    let nds = dns.map(|dns| Box::new(Nds(dns)) as Box<dyn Interceptor>);
    let pcds = pcds.map(|pcds| Box::new(pcds) as Box<dyn Interceptor>);
    let ecds = wasm.map(|wasm| Box::new(Ecds(wasm)) as Box<dyn Interceptor>);
    Interceptors::new(nds.into_iter().chain(pcds).chain(ecds).collect())
}
