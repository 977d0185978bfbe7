// SPDX-License-Identifier: Apache-2.0

package webhook

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	admissionv1 "k8s.io/api/admission/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/controller-runtime/pkg/webhook/admission"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
)

// What is decoded here has only the fields that are judged, and no list without bound, because
// anyone who reaches the port may send requests, and short JSON can be long lists of large structs.

// maxEntries bounds lists. Longer ones are refused by the API: DeviceRequestsMaxSize and
// DeviceConfigMaxSize of k8s.io/api/resource/v1. FirstAvailableDeviceRequestMaxSize is smaller.
const maxEntries = resourceapi.DeviceConfigMaxSize

// list is a list of at most [maxEntries].
type list[T any] []T

// UnmarshalJSON returns an error as soon as there is one entry too many.
func (l *list[T]) UnmarshalJSON(text []byte) error {
	*l = nil
	decoder := json.NewDecoder(bytes.NewReader(text))
	switch start, err := decoder.Token(); {
	case err != nil:
		return err
	case start == nil: // null
		return nil
	case start != json.Delim('['):
		return errors.New("has another value where a list must be")
	}

	for decoder.More() {
		if len(*l) == maxEntries {
			return fmt.Errorf("has a list of more than %d entries", maxEntries)
		}
		var entry T
		if err := decoder.Decode(&entry); err != nil {
			return err
		}
		*l = append(*l, entry)
	}

	return nil
}

// object is what is judged of a ResourceClaim, ResourceClaimTemplate or DeviceClass.
type object struct {
	Metadata struct {
		DeletionTimestamp *string `json:"deletionTimestamp"`
	} `json:"metadata"`
	Spec struct {
		devices         // of a DeviceClass
		Devices devices `json:"devices"` // of a ResourceClaim
		Spec    struct {
			Devices devices `json:"devices"`
		} `json:"spec"` // of a ResourceClaimTemplate
	} `json:"spec"`
}

// devices is what is judged of a DeviceClaim or a DeviceClassSpec, which has no requests.
type devices struct {
	Requests list[deviceRequest] `json:"requests"`
	Config   list[deviceConfig]  `json:"config"`
}

// deviceRequest is what is judged of a DeviceRequest.
type deviceRequest struct {
	Name    string `json:"name"`
	Exactly *struct {
		AdminAccess *bool `json:"adminAccess"`
	} `json:"exactly"`
	FirstAvailable list[struct {
		Name string `json:"name"`
	}] `json:"firstAvailable"`
}

// deviceConfig is what is judged of a DeviceClaimConfiguration or a DeviceClassConfiguration.
type deviceConfig struct {
	Requests list[string] `json:"requests"`
	Opaque   struct {
		Driver     string          `json:"driver"`
		Parameters json.RawMessage `json:"parameters"`
	} `json:"opaque"`
}

// decodeObject decodes an object. It returns an error if parameters for this driver are longer than
// the API takes. Those for other drivers are left out.
func decodeObject(raw []byte) (*object, error) {
	o := &object{}
	if err := json.Unmarshal(raw, o); err != nil {
		return nil, err
	}

	for _, of := range []devices{o.Spec.devices, o.Spec.Devices, o.Spec.Spec.Devices} {
		for i := range of.Config {
			opaque := &of.Config[i].Opaque
			switch {
			case opaque.Driver != v1alpha1.GroupName:
				opaque.Parameters = nil
			case len(opaque.Parameters) > resourceapi.OpaqueParametersMaxLength:
				return nil, fmt.Errorf("parameters in config[%d] have %d bytes, at most %d may be given",
					i, len(opaque.Parameters), resourceapi.OpaqueParametersMaxLength)
			}
		}
	}

	return o, nil
}

// claim returns the fields that are judged in the type of the API.
func (d devices) claim() *resourceapi.DeviceClaim {
	c := &resourceapi.DeviceClaim{}
	for _, request := range d.Requests {
		r := resourceapi.DeviceRequest{Name: request.Name}
		if request.Exactly != nil {
			r.Exactly = &resourceapi.ExactDeviceRequest{AdminAccess: request.Exactly.AdminAccess}
		}
		for _, sub := range request.FirstAvailable {
			r.FirstAvailable = append(r.FirstAvailable, resourceapi.DeviceSubRequest{Name: sub.Name})
		}
		c.Requests = append(c.Requests, r)
	}

	for _, config := range d.Config {
		c.Config = append(c.Config, resourceapi.DeviceClaimConfiguration{
			Requests: config.Requests, DeviceConfiguration: config.device(),
		})
	}

	return c
}

// class does the same as claim for a DeviceClass.
func (d devices) class() *resourceapi.DeviceClassSpec {
	c := &resourceapi.DeviceClassSpec{}
	for _, config := range d.Config {
		c.Config = append(c.Config,
			resourceapi.DeviceClassConfiguration{DeviceConfiguration: config.device()})
	}
	return c
}

func (c deviceConfig) device() resourceapi.DeviceConfiguration {
	return resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
		Driver: c.Opaque.Driver, Parameters: runtime.RawExtension{Raw: c.Opaque.Parameters},
	}}
}

// maxUID bounds what an answer repeats, in bytes. API servers send UUIDs.
const maxUID = 128

// decodeReview decodes what is judged of an AdmissionReview.
func decodeReview(body []byte) (admission.Request, error) {
	var review struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Request    *struct {
			UID         types.UID                   `json:"uid"`
			Resource    metav1.GroupVersionResource `json:"resource"`
			SubResource string                      `json:"subResource"`
			Operation   admissionv1.Operation       `json:"operation"`
			Object      runtime.RawExtension        `json:"object"`
			OldObject   runtime.RawExtension        `json:"oldObject"`
		} `json:"request"`
	}

	if err := json.Unmarshal(body, &review); err != nil {
		return admission.Request{}, fmt.Errorf("decode the review: %w", err)
	}
	if review.Kind != "AdmissionReview" || review.Request == nil ||
		review.APIVersion != admissionv1.SchemeGroupVersion.String() {
		return admission.Request{}, fmt.Errorf("must be a request in an AdmissionReview of %s",
			admissionv1.SchemeGroupVersion)
	}
	if n := len(review.Request.UID); n > maxUID {
		return admission.Request{}, fmt.Errorf("request.uid has %d bytes, at most %d may be given", n,
			maxUID)
	}

	r := review.Request
	return admission.Request{AdmissionRequest: admissionv1.AdmissionRequest{
		UID: r.UID, Resource: r.Resource, SubResource: r.SubResource, Operation: r.Operation,
		Object: r.Object, OldObject: r.OldObject,
	}}, nil
}
