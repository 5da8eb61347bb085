//! What the status port shows of each room, as JSON.

use serde_json::json;

use crate::envoy::handle::Envoy;
use crate::istiod::Istiod;
use crate::secrets::Secrets;
use crate::status::Page;
use crate::xds::observe::Observer;

pub(super) fn envoy(envoy: &Envoy) -> Page {
    let report = envoy.report();
    Page {
        path: "/debug/envoy",
        content: Box::new(move || json!(*report.borrow())),
    }
}

pub(super) fn istiod(istiod: &Istiod) -> Page {
    let istiod = istiod.clone();
    Page {
        path: "/debug/istiod",
        content: Box::new(move || json!(istiod.status())),
    }
}

pub(super) fn certificates(secrets: &Secrets) -> Page {
    let secrets = secrets.clone();
    Page {
        path: "/debug/certs",
        content: Box::new(move || json!(secrets.snapshot())),
    }
}

pub(super) fn discovery(observer: Observer) -> Page {
    Page {
        path: "/debug/xdsz",
        content: Box::new(move || json!(observer.snapshot())),
    }
}
