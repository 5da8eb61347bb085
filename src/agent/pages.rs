//! What the status port shows of each room, as JSON.

use std::sync::Arc;

use serde_json::json;

use crate::dns::Dns;
use crate::envoy::handle::Envoy;
use crate::istiod::Istiod;
use crate::secrets::Secrets;
use crate::status::Page;
use crate::xds::observe::Observer;

pub(super) fn envoy(envoy: &Envoy) -> Page {
    let report = envoy.report();
    Page {
        path: "/debug/envoy",
        content: Arc::new(move || Some(json!(*report.borrow()))),
    }
}

pub(super) fn istiod(istiod: &Istiod) -> Page {
    let istiod = istiod.clone();
    Page {
        path: "/debug/istiod",
        content: Arc::new(move || Some(json!(istiod.status()))),
    }
}

pub(super) fn certificates(secrets: &Secrets) -> Page {
    let secrets = secrets.clone();
    Page {
        path: "/debug/certs",
        content: Arc::new(move || Some(json!(secrets.snapshot()))),
    }
}

pub(super) fn discovery(observer: Observer) -> Page {
    Page {
        path: "/debug/xdsz",
        content: Arc::new(move || Some(json!(observer.snapshot()))),
    }
}

pub(super) fn name_table(dns: &Dns) -> Page {
    let dns = dns.clone();
    Page {
        path: "/debug/ndsz",
        content: Arc::new(move || dns.ndsz()),
    }
}
