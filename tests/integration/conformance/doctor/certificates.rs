//! Tests `pilot-agent doctor` with certificates that peers reject.

use std::time::Duration;

use local_istiod::{LocalIstiod, Options};
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, CertifiedIssuer, DnType,
    IsCa, KeyIdMethod, KeyPair, SerialNumber, date_time_ymd,
};

use super::diagnosed;
use crate::support::faults::{Fault, Faults, Says};
use crate::support::place::{Place, ROOT};
use crate::support::programs::variable;
use crate::support::{answering_istiod, local_istiod, restarted};

type Authority = CertifiedIssuer<'static, KeyPair>;

/// The certificates in a workload's files: the years in which root and intermediate expire, the years in which the
/// leaf becomes valid and expires, and whether the key belongs to the leaf.
#[derive(Clone, Copy)]
struct Files {
    root: i32,
    middle: i32,
    leaf: [i32; 2],
    is_own_key: bool,
}

const GOOD: Files = Files { root: 2999, middle: 2999, leaf: [2000, 2999], is_own_key: true };

impl Files {
    /// Writes the files. Returns the root and the intermediate authority.
    fn mount(self, place: &Place) -> [Authority; 2] {
        let authority = |name: &str, year| {
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, name);
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            params.not_after = date_time_ymd(year, 1, 1);
            params
        };
        let [root, middle, key, other] = std::array::from_fn(|_| KeyPair::generate().unwrap());
        let root = Authority::self_signed(authority("root", self.root), root).unwrap();
        let middle = Authority::signed_by(authority("middle", self.middle), middle, &root).unwrap();
        let mut leaf = CertificateParams::new(["workload.test".to_owned()]).unwrap();
        (leaf.not_before, leaf.not_after) = self.leaf.map(|year| date_time_ymd(year, 1, 1)).into();
        let leaf = leaf.signed_by(&key, &middle).unwrap();
        place.write("etc/certs/cert-chain.pem", leaf.pem() + &middle.pem());
        place.write("etc/certs/root-cert.pem", root.pem());
        let key = if self.is_own_key { key } else { other };
        place.write("etc/certs/key.pem", key.serialize_pem());
        [root, middle]
    }
}

/// Returns a place whose agent uses the mounted files and requests no certificate.
fn with_mounted_certificates(istiod: &LocalIstiod) -> Place {
    Place::of(istiod).set("FILE_MOUNTED_CERTS", "true").set("XDS_ROOT_CA", ROOT)
}

#[tokio::test(flavor = "multi_thread")]
async fn each_certificate_that_peers_reject_is_named_with_its_cure() {
    let mut faults = Faults::default();
    let rows: [(_, _, Says); 5] = [
        (
            "an expired intermediate",
            Files { middle: 2001, ..GOOD },
            (
                "CERTIFICATE_CHAIN_REJECTED",
                &["peers reject", "CN=middle", "2001-01-01"],
                &["root of the mesh"],
            ),
        ),
        (
            "a key of another certificate",
            Files { is_own_key: false, ..GOOD },
            (
                "SECRET_FILE_UNUSABLE",
                &["etc/certs/key.pem", "does not belong to the certificate"],
                &["the key of the first one"],
            ),
        ),
        (
            "an expired certificate",
            Files { leaf: [2000, 2020], ..GOOD },
            (
                "CERTIFICATE_EXPIRED",
                &["workload certificate", "workload.test expired", "ago", "2020-01-01T00:00:00Z"],
                &["renew the certificate"],
            ),
        ),
        (
            "a certificate of the future",
            Files { leaf: [2090, 2999], ..GOOD },
            (
                "CERTIFICATE_NOT_YET_VALID",
                &["workload certificate", "2090-01-01T00:00:00Z"],
                &["date -u"],
            ),
        ),
        (
            "an expired root",
            Files { root: 2020, ..GOOD },
            ("ROOTS_EXPIRED", &["roots of the mesh", "2020-01-01T00:00:00Z"], &["Secret cacerts"]),
        ),
    ];
    for (name, files, says) in rows {
        for is_running in [false, true] {
            faults.add(name, async move {
                let istiod = answering_istiod().await;
                let place = with_mounted_certificates(&istiod);
                files.mount(&place);
                let agent = if is_running { Some(place.start().await) } else { None };
                Fault::new(place, says).with((istiod, agent))
            });
        }
    }
    faults.add("an authority whose roots are others", async {
        let istiod = answering_istiod().await;
        istiod.publish_roots(Some(local_istiod().await.root_pem()));
        let place = Place::of(&istiod);
        let agent = place.start().await;
        agent.logs("generated new workload certificate").await;
        let says: Says = (
            "CERTIFICATE_CHAIN_REJECTED",
            &["workload certificate", "peers reject"],
            &["istio-ca-root-cert"],
        );
        Fault::new(place, says).with((agent, istiod))
    });
    type Change = fn(&mut Options);
    let clocks: [(_, Change, Says); 2] = [
        (
            "a certificate that has expired on arrival",
            |options| options.max_cert_ttl = Duration::ZERO,
            (
                "CLOCKS_DIFFER",
                &["already expired", "this clock or istiod's is wrong"],
                &["date -u"],
            ),
        ),
        (
            "a certificate that is not valid yet on arrival",
            |options| options.clock_ahead = Duration::from_secs(3600),
            ("CLOCKS_DIFFER", &["not valid yet", "this clock or istiod's is wrong"], &["date -u"]),
        ),
    ];
    for (name, change, says) in clocks {
        faults.add(name, async move {
            let istiod = restarted(answering_istiod().await, change).await;
            let place = Place::of(&istiod);
            let agent = place.start().await;
            agent.logs("CLOCKS_DIFFER").await;
            Fault::new(place, says).with((agent, istiod))
        });
    }
    faults.assert_all_reported().await;
}

/// Returns a revocation list that is empty and valid until this year.
fn list(authority: &Authority, year: i32) -> String {
    let list = CertificateRevocationListParams {
        this_update: date_time_ymd(2000, 1, 1),
        next_update: date_time_ymd(year, 1, 1),
        crl_number: SerialNumber::from(1_u64),
        issuing_distribution_point: None,
        revoked_certs: Vec::new(),
        key_identifier_method: KeyIdMethod::Sha256,
    };
    list.signed_by(authority).unwrap().pem().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_unusable_revocation_list_is_named_with_its_cure() {
    const LIST: &str = "/var/run/secrets/istio/crl/ca-crl.pem";
    const CODE: &str = "REVOCATION_LIST_UNUSABLE";
    if variable("NETNS_TESTS").is_none() {
        return eprintln!("A file system of its own takes root: run under NETNS_TESTS only.");
    }
    type Lists = fn([Authority; 2]) -> String;
    let rows: [(_, Lists, Says); 5] = [
        (
            "a list that is out of date",
            |[root, middle]| list(&root, 2999) + &list(&middle, 2020),
            (
                CODE,
                &[LIST, "no valid list of CN=middle", "2020-01-01"],
                &["write a current list", "PILOT_ENABLE_CA_CRL=false"],
            ),
        ),
        (
            "a list of another authority",
            |[root, _]| list(&root, 2999),
            (CODE, &[LIST, "no valid list of CN=middle"], &["istio-ca-crl"]),
        ),
        (
            "no list of one of the issuers",
            |[_, middle]| list(&middle, 2999),
            (CODE, &[LIST, "no valid list of CN=root"], &["every authority of the chain"]),
        ),
        (
            "something that is no list",
            |_| "no list".to_owned(),
            (CODE, &[LIST, "no valid list of"], &["in PEM or DER"]),
        ),
        (
            "an empty list",
            |_| "null".to_owned(),
            ("REVOCATION_LIST_EMPTY", &[LIST], &["write a list into the file"]),
        ),
    ];
    let mut faults = Faults::default();
    for (name, lists, says) in rows {
        faults.add(name, async move {
            let istiod = answering_istiod().await;
            let script = format!(
                "mount -t tmpfs tmpfs /var/run; mkdir -p $(dirname {LIST}); cp list {LIST}; exec \"$@\""
            );
            let place = with_mounted_certificates(&istiod).started_by(&["unshare", "--mount", "sh", "-ec", &script, "-"]);
            place.write("list", lists(GOOD.mount(&place)));
            let agent = place.start().await;
            let fault = Fault::new(place, says).with((istiod, agent));
            if says.0 == CODE { fault } else { fault.warns() }
        });
    }
    faults.assert_all_reported().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn mounted_files_are_in_order_and_a_bad_rotation_warns() {
    let istiod = answering_istiod().await;
    let place = with_mounted_certificates(&istiod);
    GOOD.mount(&place);
    let level = || {
        let (report, _) = diagnosed(&place);
        let groups = report["groups"].as_array().unwrap().iter();
        let mut group = groups.filter(|group| group["name"] == "certificate");
        let checks = group.next().unwrap()["checks"].as_array().unwrap().clone();
        let worst = ["error", "warning", "ok"];
        let has = |level: &&&str| checks.iter().any(|check| check["level"] == **level);
        (*worst.iter().find(has).unwrap(), format!("{report:#}"))
    };
    assert_eq!(level().0, "ok", "{}", level().1);
    let _agent = place.start().await;
    assert_eq!(level().0, "ok", "{}", level().1);
    // The agent serves the secret that it read before until it ends, so this is only a warning.
    place.write("etc/certs/key.pem", KeyPair::generate().unwrap().serialize_pem());
    assert_eq!(level().0, "warning", "{}", level().1);
}
