// SPDX-License-Identifier: Apache-2.0

package source

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/yaml"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool"
	"github.com/opiproject/xpu-device-plugin/pkg/node/pool/sriovdp"
)

// Parse parses declarations. They are a configuration of sriov-network-device-plugin, or documents
// of kind DevicePool in YAML or JSON. resourcePrefix is for resources without a prefix in such a
// configuration. Errors name the entry or document and the field. Warnings are about parts that are
// left out or changed.
func Parse(
	content []byte, resourcePrefix string,
) (devicePools []v1alpha1.DevicePool, warnings []string, err error) {
	if sriovdp.Is(content) {
		return sriovdp.Convert(content, resourcePrefix)
	}
	devicePools, err = parseDocuments(content)
	return devicePools, nil, err
}

func parseDocuments(content []byte) ([]v1alpha1.DevicePool, error) {
	reader := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(content)))
	var out []v1alpha1.DevicePool
	for n := 1; ; n++ {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			break
		}

		var devicePool *v1alpha1.DevicePool
		if err == nil {
			devicePool, err = parseDocument(document)
		}

		if err == nil && devicePool != nil && devicePool.Spec.Provision == v1alpha1.ProvisionAhead {
			err = errors.New("spec.provision: Ahead is only for DevicePools of the API server, " +
				"as xpu-controller must know that the pool asks for it")
		}
		if err != nil {
			return nil, fmt.Errorf("document %d: %w", n, err)
		}
		if devicePool == nil {
			continue
		}

		if slices.ContainsFunc(out, func(other v1alpha1.DevicePool) bool {
			return other.Name == devicePool.Name
		}) {
			return nil, fmt.Errorf("document %d: metadata.name: %s belongs to an earlier document",
				n, devicePool.Name)
		}

		out = append(out, *devicePool)
	}

	if len(out) == 0 {
		return nil, errors.New("must have a resourceList of sriov-network-device-plugin, or a " +
			"document of kind DevicePool")
	}

	return out, nil
}

// parseDocument parses a document. It returns nil if the document has only white space and
// comments.
func parseDocument(document []byte) (*v1alpha1.DevicePool, error) {
	var written *struct {
		metav1.TypeMeta
		Spec struct {
			Selectors []map[string]any `json:"selectors"`
		} `json:"spec"`
	}

	if err := yaml.Unmarshal(document, &written); err != nil || written == nil {
		return nil, err
	}

	const kind = "DevicePool"
	if want := v1alpha1.SchemeGroupVersion.String(); written.Kind != kind ||
		written.APIVersion != want {
		return nil, fmt.Errorf("apiVersion %q and kind %q: must be %s and %s", written.APIVersion,
			written.Kind, want, kind)
	}

	var devicePool v1alpha1.DevicePool
	if err := yaml.UnmarshalStrict(document, &devicePool); err != nil {
		return nil, err
	}

	for i, selector := range written.Spec.Selectors {
		// The Go types cannot distinguish it from "isRdma: false", which selects everything on
		// purpose.
		if len(selector) == 0 {
			return nil, fmt.Errorf("DevicePool %s: spec.selectors[%d]: must have at least one "+
				"field; isRdma: false selects everything",
				devicePool.Name, i)
		}
	}

	setDefaults(&devicePool.Spec)
	return &devicePool, pool.Check(devicePool)
}

// setDefaults sets the fields to which the API server gives a default, according to the CRD.
func setDefaults(spec *v1alpha1.DevicePoolSpec) {
	spec.Publish = cmp.Or(spec.Publish, v1alpha1.PublishDRA)
	spec.Provision = cmp.Or(spec.Provision, v1alpha1.ProvisionOnPrepare)
	if spec.SFs != nil {
		spec.SFs.FirstNumber = cmp.Or(spec.SFs.FirstNumber, 1)
	}
	if plugin := spec.DevicePlugin; plugin != nil {
		plugin.ProvisionAt = cmp.Or(plugin.ProvisionAt, v1alpha1.ProvisionAtAdd)
		plugin.PreferredAllocation = cmp.Or(plugin.PreferredAllocation, v1alpha1.PreferPack)
	}
}
