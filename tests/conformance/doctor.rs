//! `pilot-agent doctor` against set-ups with one fault each: the first error of its report names the
//! cause, with and without a running agent.
//!
//! A row is a [`SetUp`]; all of a test are made and examined side by side.

use std::any::Any;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::task::{JoinSet, block_in_place};
use tokio::time::Instant;

use crate::support::local_istiod;
use crate::support::place::{Place, ROOT};

/// A set-up with one fault.
struct SetUp {
    place: Place,
    /// What the first error of its report contains, all of them.
    says: Vec<String>,
    /// What must live until the report is there, such as a control plane or an agent.
    keeps: Box<dyn Any + Send>,
}

/// The set-ups of a test, being made and examined.
#[derive(Default)]
struct Rows(JoinSet<()>);

impl Rows {
    fn add(&mut self, name: &'static str, set_up: impl Future<Output = SetUp> + Send + 'static) {
        self.0.spawn(async move {
            let SetUp { place, says, keeps } = set_up.await;
            let (report, code) = diagnosed(&place);
            let text = format!("{name}: {report:#}");
            assert_eq!(code, 2, "{text}");
            let checks = checks(&report);
            let first = checks.iter().find(|check| check["level"] == "error");
            let first = first.unwrap_or_else(|| panic!("{text}")).to_string();
            for words in says {
                assert!(
                    first.contains(&words),
                    "{words:?} is not in {first}\n{text}"
                );
            }
            drop(keeps);
        });
    }

    async fn all_name_their_cause(self) {
        self.0.join_all().await;
    }
}

/// The report of `pilot-agent doctor --json`, and its exit code. It takes less than 3 s.
fn diagnosed(place: &Place) -> (Value, i32) {
    let began = Instant::now();
    let output = block_in_place(|| place.run(&["doctor", "--json"]));
    let took = began.elapsed();
    let errors = String::from_utf8_lossy(&output.stderr);
    let report = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("{errors}"));
    assert!(took < Duration::from_secs(3), "{took:?}: {report:#}");
    (report, output.status.code().unwrap_or(-1))
}

/// The checks of all groups in order.
fn checks(report: &Value) -> Vec<&Value> {
    let groups = report["groups"].as_array().into_iter().flatten();
    let checks = groups.flat_map(|group| group["checks"].as_array().into_iter().flatten());
    checks.collect()
}

fn says(words: &[&str]) -> Vec<String> {
    words.iter().map(|&word| word.to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn each_fault_of_the_configuration_is_the_first_error() {
    let mut rows = Rows::default();
    rows.add("unusable PROXY_CONFIG", async {
        let istiod = local_istiod().await;
        SetUp {
            place: Place::of(&istiod).proxy("drainDuration", json!("soon")),
            says: says(&["drainDuration", "soon", "a duration"]),
            keeps: Box::new(istiod),
        }
    });
    rows.add("no roots at the start", async {
        let istiod = local_istiod().await;
        let place = Place::of(&istiod);
        std::fs::remove_file(place.path(ROOT)).unwrap();
        SetUp {
            place,
            says: says(&[ROOT, "an existing file of root certificates"]),
            keeps: Box::new(istiod),
        }
    });
    rows.all_name_their_cause().await;
}
