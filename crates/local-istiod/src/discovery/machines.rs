//! Machines whose agents are connected, as endpoints.
//!
//! An agent whose node metadata name a WorkloadGroup (`AUTO_REGISTER_GROUP`) registers its machine for
//! as long as its stream is open. An endpoint with the address `workload-group:<namespace>/<name>`
//! stands for the machines of that group. A machine with a readiness probe counts after healthy reports
//! only.

use std::collections::BTreeMap;
use std::sync::Arc;

use envoy_types::pb::envoy::config::core::v3::address::Address;
use envoy_types::pb::envoy::config::endpoint::v3::lb_endpoint::HostIdentifier;
use envoy_types::pb::envoy::config::endpoint::v3::{ClusterLoadAssignment, LbEndpoint};
use prost::Message;
use tokio::sync::watch;

use super::ENDPOINTS;
use crate::resource::Resource;
use crate::snapshot::Resources;

const GROUP: &str = "workload-group:";

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Machine {
    /// Namespace and name.
    pub(super) group: String,
    pub(super) address: String,
}

/// The registered machines. Clones share them.
#[derive(Clone, Debug, Default)]
pub(super) struct Machines(watch::Sender<BTreeMap<Machine, Registered>>);

#[derive(Debug)]
struct Registered {
    /// That of the newest stream.
    id: Arc<()>,
    is_healthy: bool,
}

/// Ends when it is dropped, unless a newer stream has registered the machine again.
#[derive(Debug)]
pub(super) struct Registration {
    machines: Machines,
    machine: Machine,
    id: Arc<()>,
}

/// Sees changes of the machines.
#[derive(Debug)]
pub(super) struct View(watch::Receiver<BTreeMap<Machine, Registered>>);

impl Machines {
    pub(super) fn register(&self, machine: &Machine, is_healthy: bool) -> Registration {
        let id = Arc::new(());
        let registered = Registered {
            id: id.clone(),
            is_healthy,
        };
        self.0
            .send_modify(|all| drop(all.insert(machine.clone(), registered)));
        Registration {
            machines: self.clone(),
            machine: machine.clone(),
            id,
        }
    }

    pub(super) fn view(&self) -> View {
        View(self.0.subscribe())
    }
}

impl Registration {
    pub(super) fn report(&self, is_healthy: bool) {
        self.machines.0.send_modify(|all| {
            if let Some(registered) = all.get_mut(&self.machine)
                && Arc::ptr_eq(&registered.id, &self.id)
            {
                registered.is_healthy = is_healthy;
            }
        });
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.machines.0.send_modify(|all| {
            all.retain(|machine, registered| {
                *machine != self.machine || !Arc::ptr_eq(&registered.id, &self.id)
            });
        });
    }
}

impl View {
    /// Waits for a change that [`View::fill`] has not seen. Cancel safe.
    pub(super) async fn changed(&mut self) {
        let _ = self.0.changed().await; // The service has a sender.
    }

    /// Puts the healthy machines of a group in place of each endpoint that stands for them.
    pub(super) fn fill(&mut self, resources: &mut Resources) {
        let machines = self.0.borrow_and_update();
        let healthy = machines.iter().filter(|(_, at)| at.is_healthy);
        let healthy: Vec<_> = healthy.map(|(machine, _)| machine).collect();
        let assignments = resources.get_mut(ENDPOINTS).into_iter().flatten();
        for (name, resource) in assignments {
            let mut windows = resource.any.value.windows(GROUP.len());
            if windows.any(|window| window == GROUP.as_bytes())
                && let Ok(mut assignment) = ClusterLoadAssignment::decode(&*resource.any.value)
            {
                for locality in &mut assignment.endpoints {
                    let written = std::mem::take(&mut locality.lb_endpoints).into_iter();
                    let filled = written.flat_map(|endpoint| instances(endpoint, &healthy));
                    locality.lb_endpoints = filled.collect();
                }
                let filled = assignment.encode_to_vec();
                *resource = Arc::new(Resource::new(name.clone(), ENDPOINTS, filled));
            }
        }
    }
}

/// The endpoint itself, or one for each of its group's machines.
fn instances(mut endpoint: LbEndpoint, healthy: &[&Machine]) -> Vec<LbEndpoint> {
    let Some(group) =
        address(&mut endpoint).and_then(|it| Some(it.strip_prefix(GROUP)?.to_owned()))
    else {
        return vec![endpoint];
    };
    let members = healthy.iter().filter(|machine| machine.group == group);
    let instance = |machine: &&Machine| {
        let mut endpoint = endpoint.clone();
        if let Some(address) = address(&mut endpoint) {
            address.clone_from(&machine.address);
        }
        endpoint
    };
    members.map(instance).collect()
}

fn address(endpoint: &mut LbEndpoint) -> Option<&mut String> {
    let HostIdentifier::Endpoint(endpoint) = endpoint.host_identifier.as_mut()? else {
        return None;
    };
    match endpoint.address.as_mut()?.address.as_mut()? {
        Address::SocketAddress(socket) => Some(&mut socket.address),
        _ => None,
    }
}
