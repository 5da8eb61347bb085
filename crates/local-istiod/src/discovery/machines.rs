//! Machines whose agents are connected, which become endpoints.
//!
//! An agent whose node metadata name a WorkloadGroup (`AUTO_REGISTER_GROUP`) registers its machine for
//! as long as its stream is open. An endpoint with the address `workload-group:<namespace>/<name>`
//! stands for the machines of that group. A machine with a readiness probe is an endpoint only while its
//! last report is healthy.

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
    /// The namespace and the name of the WorkloadGroup.
    pub(super) group: String,
    pub(super) address: String,
}

/// The registered machines, which all clones share.
#[derive(Clone, Debug, Default)]
pub(super) struct Machines(watch::Sender<BTreeMap<Machine, Registered>>);

#[derive(Debug)]
struct Registered {
    /// The identity of the newest stream's registration.
    id: Arc<()>,
    is_healthy: bool,
}

/// The registration of a machine by a stream. Dropping it removes the machine, unless a newer stream has
/// registered the machine again.
#[derive(Debug)]
pub(super) struct Registration {
    machines: Machines,
    machine: Machine,
    id: Arc<()>,
}

/// A receiver of changes of the machines.
#[derive(Debug)]
pub(super) struct View(watch::Receiver<BTreeMap<Machine, Registered>>);

impl Machines {
    pub(super) fn register(&self, machine: &Machine, is_healthy: bool) -> Registration {
        let id = Arc::new(());
        let registered = Registered { id: id.clone(), is_healthy };
        self.0.send_modify(|all| drop(all.insert(machine.clone(), registered)));
        Registration { machines: self.clone(), machine: machine.clone(), id }
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
    /// Waits for a change that [`View::fill`] has not seen. This function is cancel safe.
    pub(super) async fn changed(&mut self) {
        let _ = self.0.changed().await; // The service holds a sender.
    }

    /// Replaces each endpoint that stands for a group by the healthy machines of the group.
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
                    let filled = written.flat_map(|endpoint| expand_group(endpoint, &healthy));
                    locality.lb_endpoints = filled.collect();
                }
                let filled = assignment.encode_to_vec();
                *resource = Arc::new(Resource::new(name.clone(), ENDPOINTS, filled));
            }
        }
    }
}

/// Returns the endpoint itself, or one endpoint for each machine of its group.
fn expand_group(mut endpoint: LbEndpoint, healthy: &[&Machine]) -> Vec<LbEndpoint> {
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
