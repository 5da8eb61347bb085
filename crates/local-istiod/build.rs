//! Compiles the definition of istiod's certificate service, and compiles Envoy's own definitions into
//! the descriptors that are needed to read resource files.

#![expect(clippy::disallowed_methods, reason = "cargo speaks to build scripts by the environment")]

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use protox::prost::Message;
use protox::prost_reflect::prost_types::{FileDescriptorProto, FileDescriptorSet};

const PROTO: &str = "../../proto";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={PROTO}");
    // Another version of `envoy-types` brings other definitions.
    println!("cargo::rerun-if-changed=../../Cargo.lock");
    let service = protox::compile(["security/v1alpha1/ca.proto"], [PROTO])?;
    tonic_prost_build::configure().build_transport(false).compile_fds(service)?;
    let out = env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?;
    fs::write(Path::new(&out).join("envoy.fds"), envoy_descriptors()?)?;
    Ok(())
}

/// Returns descriptors of all v3 messages of Envoy, compiled from the definitions in the crate
/// `envoy-types`.
fn envoy_descriptors() -> Result<Vec<u8>, Box<dyn Error>> {
    let definitions = envoy_types_folder()?.join("proto");
    let includes = [
        "data-plane-api",
        "xds",
        "protoc-gen-validate",
        "googleapis",
        "client_model",
        "cel-spec/proto",
        "opentelemetry-proto",
    ]
    .map(|root| definitions.join(root));
    let mut files = Vec::new();
    collect(&definitions.join("data-plane-api/envoy"), &mut files)?;
    collect(&definitions.join("xds"), &mut files)?;
    let mut compiled = BTreeMap::new();
    while !files.is_empty() {
        let left = compile_some(&includes, &files, &mut compiled)?;
        if left.len() == files.len() {
            // `cargo build -vv` shows this line. A resource of a type without a descriptor is refused,
            // with an error that names the type.
            println!("no descriptors for {left:?}");
            break;
        }
        files = left;
    }
    let file = compiled.into_values().collect();
    Ok(FileDescriptorSet { file }.encode_to_vec())
}

/// Compiles the `files` that can be compiled together, and returns the remaining files.
///
/// Files remain because of relative names: in `envoy.extensions.filters`, `config.core.v3` means
/// `envoy.config.core.v3`, but the compiler looks no further than `envoy.extensions.config` once any
/// file, imported or not, has made that a package. A new compiler finds the names of the remaining
/// files.
fn compile_some(
    includes: &[PathBuf],
    files: &[PathBuf],
    compiled: &mut BTreeMap<String, FileDescriptorProto>,
) -> Result<Vec<PathBuf>, Box<dyn Error>> {
    let mut compiler = protox::Compiler::new(includes)?;
    compiler.include_imports(true).include_source_info(false);
    let mut left = Vec::new();
    for file in files {
        if compiler.open_file(file).is_err() {
            left.push(file.clone());
        }
    }
    for file in compiler.file_descriptor_set().file {
        compiled.insert(file.name().to_owned(), file);
    }
    Ok(left)
}

/// Returns the folder in which cargo stores the crate: in its registry, or among vendored crates.
fn envoy_types_folder() -> Result<PathBuf, Box<dyn Error>> {
    // `--offline` suffices unless a crate that only tests need was never downloaded.
    let metadata = metadata(&["--offline"]).or_else(|_| metadata(&[]))?;
    let packages = metadata["packages"].as_array().ok_or("no packages")?;
    let manifest = packages
        .iter()
        .find(|package| package["name"] == "envoy-types")
        .and_then(|package| package["manifest_path"].as_str())
        .ok_or("cargo metadata does not list envoy-types")?;
    let folder = Path::new(manifest).parent().ok_or("no folder")?;
    Ok(folder.to_owned())
}

fn metadata(more: &[&str]) -> Result<serde_json::Value, Box<dyn Error>> {
    let variable = |name| env::var_os(name).ok_or(format!("{name} is not set"));
    let output = Command::new(variable("CARGO")?)
        .args(["metadata", "--format-version", "1", "--filter-platform"])
        .arg(variable("TARGET")?)
        .args(more)
        .current_dir(variable("CARGO_MANIFEST_DIR")?)
        .output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into());
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn collect(folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), Box<dyn Error>> {
    let mut entries: Vec<_> = fs::read_dir(folder)?.collect::<Result<_, _>>()?;
    entries.sort_by_key(fs::DirEntry::path);
    for entry in entries {
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            collect(&path, files)?;
        } else if path.extension().is_some_and(|extension| extension == "proto") {
            files.push(path);
        }
    }
    Ok(())
}
