//! Collects the agent's own metrics, and renders them in Prometheus' text format (0.0.4).
//!
//! A module gets counters, gauges and histograms from the [`Registry`] by name; the same name returns
//! the same metric. A series appears with its first recording, like pilot-agent's, and no suffix is
//! added to names. Cardinality is not bounded: labels have values from small sets.

pub(crate) mod process;
mod text;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use parking_lot::Mutex;

/// The registered families. Clones share them.
#[derive(Clone, Default)]
pub struct Registry(Arc<Mutex<BTreeMap<&'static str, Family>>>);

/// The type of a family.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// A number that only grows.
#[derive(Clone, Debug)]
pub struct Counter(Arc<Cell>);

/// A number that goes up and down.
#[derive(Clone, Debug)]
pub struct Gauge(Arc<Cell>);

/// Counts values in buckets.
#[derive(Clone, Debug)]
pub struct Histogram(Arc<Buckets>);

/// Counters that differ in their labels.
#[derive(Clone, Debug)]
pub struct Counters<const N: usize>(Cells);

/// Computes the series of a family for a scrape.
pub type Collect = dyn Fn(&mut dyn FnMut(&[&str], f64)) + Send + Sync;

#[derive(Clone)]
struct Family {
    help: &'static str,
    kind: Kind,
    labels: &'static [&'static str],
    series: Series,
}

#[derive(Clone)]
enum Series {
    Cells(Cells),
    Buckets(Arc<Buckets>),
    Computed(Arc<Collect>),
}

/// Cells by the values of their labels.
type Cells = Arc<Mutex<BTreeMap<Vec<String>, Arc<Cell>>>>;

/// The value of a series: the bits of an `f64` for a gauge, a `u64` for a counter.
#[derive(Debug, Default)]
struct Cell {
    bits: AtomicU64,
    is_recorded: AtomicBool,
}

#[derive(Debug)]
struct Buckets {
    bounds: &'static [f64],
    /// The counts, one more than bounds: the last one counts values above all of them.
    counts: Vec<AtomicU64>,
    sum: AtomicU64,
}

impl Registry {
    pub fn counter(&self, name: &'static str, help: &'static str) -> Counter {
        self.counters::<0>(name, help, &[]).with([])
    }

    pub fn counters<const N: usize>(
        &self,
        name: &'static str,
        help: &'static str,
        labels: &'static [&'static str; N],
    ) -> Counters<N> {
        Counters(self.cells(name, help, Kind::Counter, labels))
    }

    pub fn gauge(&self, name: &'static str, help: &'static str) -> Gauge {
        Gauge(cell(&self.cells(name, help, Kind::Gauge, &[]), []))
    }

    /// Returns a histogram whose buckets end at `bounds`, which ascend and do not include infinity.
    pub fn histogram(
        &self,
        name: &'static str,
        help: &'static str,
        bounds: &'static [f64],
    ) -> Histogram {
        let buckets = Arc::new(Buckets {
            bounds,
            counts: (0..=bounds.len()).map(|_| AtomicU64::new(0)).collect(),
            sum: AtomicU64::new(0),
        });
        match self.register(name, help, Kind::Histogram, &[], Series::Buckets(buckets.clone())) {
            Series::Buckets(buckets) => Histogram(buckets),
            // The name belongs to a family of another kind, so this one is not rendered.
            _ => Histogram(buckets),
        }
    }

    /// Registers a family whose series `collect` computes for each scrape.
    pub fn computed(
        &self,
        name: &'static str,
        help: &'static str,
        kind: Kind,
        labels: &'static [&'static str],
        collect: impl Fn(&mut dyn FnMut(&[&str], f64)) + Send + Sync + 'static,
    ) {
        self.register(name, help, kind, labels, Series::Computed(Arc::new(collect)));
    }

    /// Renders the families in the order of their names, each with its series.
    pub fn render(&self) -> String {
        // It is not locked while families are computed, which may take a while and register others.
        let families: Vec<_> = self.0.lock().iter().map(|(n, f)| (*n, f.clone())).collect();
        let mut page = String::new();
        for (name, family) in families {
            let series = family.series(name);
            if !series.is_empty() {
                let help = family.help;
                let kind = family.kind.name();
                page += &format!("# HELP {name} {help}\n# TYPE {name} {kind}\n{series}");
            }
        }
        page
    }

    fn cells(
        &self,
        name: &'static str,
        help: &'static str,
        kind: Kind,
        labels: &'static [&'static str],
    ) -> Cells {
        match self.register(name, help, kind, labels, Series::Cells(Cells::default())) {
            Series::Cells(cells) => cells,
            // The name belongs to a family of another kind, so this one is not rendered.
            _ => Cells::default(),
        }
    }

    /// Registers the series, unless the name is registered already. Returns the registered series.
    fn register(
        &self,
        name: &'static str,
        help: &'static str,
        kind: Kind,
        labels: &'static [&'static str],
        series: Series,
    ) -> Series {
        let mut families = self.0.lock();
        let family = families.entry(name).or_insert(Family { help, kind, labels, series });
        family.series.clone()
    }
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

impl fmt::Debug for Registry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.lock().keys()).finish()
    }
}

impl<const N: usize> Counters<N> {
    pub fn with(&self, values: [&str; N]) -> Counter {
        Counter(cell(&self.0, values))
    }
}

impl Counter {
    pub fn inc(&self) {
        self.add(1);
    }

    pub fn add(&self, count: u64) {
        self.0.bits.fetch_add(count, Ordering::Relaxed);
        self.0.is_recorded.store(true, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.bits.load(Ordering::Relaxed)
    }
}

impl Gauge {
    pub fn set(&self, value: f64) {
        self.0.bits.store(value.to_bits(), Ordering::Relaxed);
        self.0.is_recorded.store(true, Ordering::Relaxed);
    }

    /// Sets the value unless it is greater already. A negative value counts as zero.
    pub fn raise(&self, value: f64) {
        let bits = value.max(0.0).to_bits();
        // The bits of non-negative floats have the order of their values.
        self.0.bits.fetch_max(bits, Ordering::Relaxed);
        self.0.is_recorded.store(true, Ordering::Relaxed);
    }
}

impl Histogram {
    pub fn observe(&self, value: f64) {
        let buckets = &self.0;
        let index = buckets.bounds.partition_point(|bound| *bound < value);
        // It does not fail, because the new value is always given.
        let _ = buckets.sum.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |bits| {
            Some((f64::from_bits(bits) + value).to_bits())
        });
        buckets.counts[index].fetch_add(1, Ordering::Relaxed);
    }
}

fn cell<const N: usize>(cells: &Cells, values: [&str; N]) -> Arc<Cell> {
    cells.lock().entry(values.map(str::to_owned).to_vec()).or_default().clone()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_series_appears_with_its_first_recording() {
        let registry = Registry::default();
        let requests = registry.counter("istio_agent_requests", "Requests.");
        let ends = registry.counters("istio_agent_ends", "Ends.", &["type"]);
        assert_eq!(registry.render(), "");
        requests.add(0);
        ends.with(["error"]).inc();
        assert_eq!(
            registry.render(),
            "# HELP istio_agent_ends Ends.\n# TYPE istio_agent_ends counter\n\
             istio_agent_ends{type=\"error\"} 1\n\
             # HELP istio_agent_requests Requests.\n# TYPE istio_agent_requests counter\n\
             istio_agent_requests 0\n"
        );
    }

    #[test]
    fn the_same_name_gives_the_same_counter() {
        let registry = Registry::default();
        registry.counter("a", "A.").inc();
        registry.counter("a", "A.").inc();
        assert_eq!(registry.counter("a", "A.").get(), 2);
    }

    #[test]
    fn a_raised_gauge_keeps_its_greatest_value() {
        let registry = Registry::default();
        let gauge = registry.gauge("a", "A.");
        for value in [7.0, 1000.5, 20.0, -1.0] {
            gauge.raise(value);
        }
        assert!(registry.render().ends_with("a 1000.5\n"));
    }
}
