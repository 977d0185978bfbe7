// SPDX-License-Identifier: Apache-2.0

package image

import (
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"maps"
	"os"
	"path"
	"runtime/debug"
	"slices"
	"strings"

	cdx "github.com/CycloneDX/cyclonedx-go"
	"github.com/package-url/packageurl-go"
)

// WriteSBOM writes the image's bill of materials to file, as CycloneDX 1.6 in JSON. It lists the
// files with their digests, and the Go modules in each according to its build information. The same
// input gives the same file, because there is no serial number and no time in it.
func WriteSBOM(file, ref string, specs ...Spec) error {
	b := inventory{modules: map[string]cdx.Component{}}
	for _, spec := range specs {
		for _, f := range spec.Files {
			if err := b.add(spec, f); err != nil {
				return fmt.Errorf("image %s: bill of materials: %s: %w", ref, f.Source, err)
			}
		}
	}

	out, err := os.Create(file)
	if err != nil {
		return err
	}

	err = cdx.NewBOMEncoder(out,
		cdx.BOMFileFormatJSON).SetPretty(true).Encode(b.bom(ref, specs[0].Labels))
	if errClose := out.Close(); err == nil {
		err = errClose
	}
	if err != nil {
		return fmt.Errorf("image %s: bill of materials: %w", ref, err)
	}

	return nil
}

type inventory struct {
	files   []cdx.Component
	needs   []cdx.Dependency
	modules map[string]cdx.Component // by reference, which is the package URL
}

func (b *inventory) add(spec Spec, f File) error {
	digest, err := digest(f.Source)
	if err != nil {
		return err
	}

	ref := "linux/" + spec.Arch + f.Target
	b.files = append(b.files, cdx.Component{
		BOMRef: ref,
		Type:   cdx.ComponentTypeFile,
		Name:   f.Target,
		Hashes: &[]cdx.Hash{{Algorithm: cdx.HashAlgoSHA256, Value: digest}},
		Properties: &[]cdx.Property{
			{Name: "platform", Value: "linux/" + spec.Arch},
		},
	})

	info, err := buildinfo.ReadFile(f.Source)
	if err != nil {
		return fmt.Errorf("what it is made of is known of Go programs only: %w", err)
	}

	modules := []cdx.Component{
		module(debug.Module{Path: "std", Version: strings.TrimPrefix(info.GoVersion, "go")}),
	}
	for _, dep := range info.Deps {
		if dep.Replace != nil {
			dep = dep.Replace
		}
		modules = append(modules, module(*dep))
	}

	var refs []string
	for _, m := range modules {
		b.modules[m.BOMRef] = m
		refs = append(refs, m.BOMRef)
	}

	b.needs = append(b.needs, cdx.Dependency{Ref: ref, Dependencies: &refs})
	return nil
}

// module returns the component for a Go module. Its digest is go.sum's (h1, see
// golang.org/x/mod/sumdb/dirhash).
func module(m debug.Module) cdx.Component {
	namespace, name := path.Split(m.Path)
	purl := packageurl.NewPackageURL(packageurl.TypeGolang, strings.TrimSuffix(namespace, "/"),
		name, m.Version, nil, "").ToString()
	component := cdx.Component{
		BOMRef:     purl,
		Type:       cdx.ComponentTypeLibrary,
		Name:       m.Path,
		Version:    m.Version,
		PackageURL: purl,
	}

	if sum, err := base64.StdEncoding.DecodeString(strings.TrimPrefix(m.Sum, "h1:")); err == nil &&
		len(sum) == sha256.Size {
		component.Hashes = &[]cdx.Hash{
			{Algorithm: cdx.HashAlgoSHA256, Value: hex.EncodeToString(sum)},
		}
	}

	return component
}

func (b *inventory) bom(ref string, labels map[string]string) *cdx.BOM {
	bom := cdx.NewBOM()
	bom.SpecVersion = cdx.SpecVersion1_6
	bom.Metadata = &cdx.Metadata{Component: &cdx.Component{
		BOMRef:  ref,
		Type:    cdx.ComponentTypeContainer,
		Name:    ref,
		Version: labels["org.opencontainers.image.version"],
	}}

	components := slices.Clone(b.files)
	var files []string
	for _, f := range b.files {
		files = append(files, f.BOMRef)
	}

	for _, key := range slices.Sorted(maps.Keys(b.modules)) {
		components = append(components, b.modules[key])
	}

	bom.Components = &components
	dependencies := append([]cdx.Dependency{{Ref: ref, Dependencies: &files}}, b.needs...)
	bom.Dependencies = &dependencies

	return bom
}

// digest returns the SHA-256 of a file in hexadecimal.
func digest(file string) (string, error) {
	in, err := os.Open(file)
	if err != nil {
		return "", err
	}
	defer in.Close()

	h := sha256.New()
	if _, err := io.Copy(h, in); err != nil {
		return "", err
	}

	return hex.EncodeToString(h.Sum(nil)), nil
}
